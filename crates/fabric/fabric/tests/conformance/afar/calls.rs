//! The first word of each call.
pub const CONNECT: u64 = 0;
pub const REGISTER: u64 = 1;
pub const POST: u64 = 2;
pub const POLL: u64 = 3;
pub const RECEIVE: u64 = 4;
pub const IS_BROKEN: u64 = 5;
