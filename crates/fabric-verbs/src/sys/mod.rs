//! Safe handles of what libibverbs and librdmacm give. The libraries are opened when they are first called: where they are not installed, every call fails and says so.

pub(super) mod completions;
pub(super) mod connection;
pub(super) mod device;
pub(super) mod queue_pair;
pub(super) mod receives;
pub(super) mod registration;
pub(super) mod window;
