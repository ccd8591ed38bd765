//! Tests of the client over the providers that need no device.

mod shm;
mod tcp;
