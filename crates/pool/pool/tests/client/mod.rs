//! The client, over the providers that need no device.

mod shm;
mod tcp;
