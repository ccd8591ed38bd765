//! The interface between copies and the heap that stores them.

use aquifer_objects::client::{ClientError, DirectRead, HeapClient};
use aquifer_objects::pointer::Pointer;
use aquifer_objects::wire::Refused;

/// A heap of objects on one node.
pub trait Store: Send {
    /// The error of a failed operation.
    type Error: std::error::Error + Send + 'static;

    /// Allocates an object with these bytes.
    ///
    /// # Errors
    /// If the heap is full, or the node does not answer; then the object may exist.
    fn create(&mut self, bytes: &[u8]) -> Result<Pointer, Self::Error>;

    /// Replaces at most 32 KiB of an object, from byte `offset` on. `offset` is a multiple of 8.
    ///
    /// # Errors
    /// If there is no such object, or the node does not answer.
    fn write_at(&mut self, object: Pointer, offset: usize, bytes: &[u8]) -> Result<(), Self::Error>;

    /// Reads the first bytes of objects. Returns false if one of the objects does not exist.
    ///
    /// # Errors
    /// If the node does not answer.
    fn read(&mut self, reads: &mut [(Pointer, &mut [u8])]) -> Result<bool, Self::Error>;

    /// Frees an object, if it exists.
    ///
    /// # Errors
    /// If the node does not answer.
    fn free(&mut self, object: Pointer) -> Result<(), Self::Error>;
}

impl Store for HeapClient {
    type Error = ClientError;

    fn create(&mut self, bytes: &[u8]) -> Result<Pointer, ClientError> {
        HeapClient::create(self, bytes)
    }

    fn write_at(&mut self, mut object: Pointer, offset: usize, bytes: &[u8]) -> Result<(), ClientError> {
        let offset = u32::try_from(offset).map_err(|_| Refused::TooLarge)?;
        HeapClient::write_at(self, &mut object, offset, bytes).map(drop)
    }

    fn read(&mut self, reads: &mut [(Pointer, &mut [u8])]) -> Result<bool, ClientError> {
        let mut direct: Vec<_> =
            reads.iter_mut().map(|(pointer, out)| DirectRead::new(*pointer, out)).collect();
        match self.get_many(&mut direct) {
            Err(ClientError::Refused(Refused::NoObject | Refused::TooLarge)) => Ok(false),
            read => read.map(|()| true),
        }
    }

    fn free(&mut self, object: Pointer) -> Result<(), ClientError> {
        match HeapClient::free(self, object) {
            Err(ClientError::Refused(Refused::NoObject)) => Ok(()),
            freed => freed,
        }
    }
}
