//! Safe wrappers of libibverbs and librdmacm. The libraries are loaded at the first call. If they
//! are not installed, every call fails with an error that names the library.

pub(super) mod completions;
pub(super) mod connection;
pub(super) mod device;
pub(super) mod queue_pair;
pub(super) mod receives;
pub(super) mod registration;
pub(super) mod window;
