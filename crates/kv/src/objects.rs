//! What a store needs of a heap.

use aquifer_objects::class::Classes;
use aquifer_objects::client::{ClientError, DirectRead, HeapClient};
use aquifer_objects::pointer::Pointer;
use aquifer_objects::wire::Refused;

/// What has become of a conditional write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    /// It was made.
    Done {
        /// The pointer names an old block, and so keeps an address in use.
        is_old: bool,
    },
    /// The object's first word was another.
    Changed,
    /// There is no such object.
    Gone,
}

/// A heap of objects, as far as a store uses it.
pub trait Objects {
    /// Why an operation failed. Its outcome may be unknown.
    type Error: std::error::Error;

    /// The first object of the heap, all zeros at first, of at least `bytes` bytes.
    ///
    /// # Errors
    /// If the heap fails.
    fn root(&mut self, bytes: u32) -> Result<Pointer, Self::Error>;

    /// Allocates an object with these bytes.
    ///
    /// # Errors
    /// If the heap fails.
    fn create(&mut self, contents: &[u8]) -> Result<Pointer, Self::Error>;

    /// Reads a whole object, with what it has behind the bytes that were written. Returns whether
    /// there is one.
    ///
    /// # Errors
    /// If the heap fails.
    fn read(&mut self, pointer: &mut Pointer, out: &mut Vec<u8>) -> Result<bool, Self::Error>;

    /// [`Self::read`] for several objects. Returns whether all are there; otherwise no bytes are
    /// valid.
    ///
    /// # Errors
    /// If the heap fails.
    fn read_many(&mut self, pointers: &mut [Pointer], outs: &mut [Vec<u8>]) -> Result<bool, Self::Error>;

    /// Replaces the first bytes of an object if its first word is `expected`.
    ///
    /// # Errors
    /// If the heap fails.
    fn write_if(
        &mut self,
        pointer: &mut Pointer,
        expected: u64,
        bytes: &[u8],
    ) -> Result<Written, Self::Error>;

    /// Frees an object, if it is there.
    ///
    /// # Errors
    /// If the heap fails.
    fn free(&mut self, pointer: Pointer) -> Result<(), Self::Error>;

    /// Whether an object of `bytes` bytes would be of the size class of this one.
    fn is_of_class(&self, pointer: Pointer, bytes: usize) -> bool;
}

/// Bytes of a pointer's object, as many as it has.
fn payload_bytes(pointer: Pointer) -> Option<usize> {
    Classes::standard().get(pointer.class).map(|class| class.payload_bytes() as usize)
}

impl Objects for HeapClient {
    type Error = ClientError;

    fn root(&mut self, bytes: u32) -> Result<Pointer, ClientError> {
        HeapClient::root(self, bytes)
    }

    fn create(&mut self, contents: &[u8]) -> Result<Pointer, ClientError> {
        HeapClient::create(self, contents)
    }

    fn read(&mut self, pointer: &mut Pointer, out: &mut Vec<u8>) -> Result<bool, ClientError> {
        let Some(len) = payload_bytes(*pointer) else { return Ok(false) };
        out.resize(len, 0);
        match self.get(pointer, out) {
            Err(ClientError::Refused(Refused::NoObject)) => Ok(false),
            result => result.map(|()| true),
        }
    }

    fn read_many(&mut self, pointers: &mut [Pointer], outs: &mut [Vec<u8>]) -> Result<bool, ClientError> {
        let mut reads = Vec::with_capacity(pointers.len());
        for (pointer, out) in pointers.iter().zip(outs.iter_mut()) {
            let Some(len) = payload_bytes(*pointer) else { return Ok(false) };
            out.resize(len, 0);
            reads.push(DirectRead::new(*pointer, out));
        }
        match self.get_many(&mut reads) {
            Err(ClientError::Refused(Refused::NoObject)) => return Ok(false),
            result => result?,
        }
        pointers.iter_mut().zip(&reads).for_each(|(pointer, read)| *pointer = read.pointer);
        Ok(true)
    }

    fn write_if(
        &mut self,
        pointer: &mut Pointer,
        expected: u64,
        bytes: &[u8],
    ) -> Result<Written, ClientError> {
        match HeapClient::write_if(self, pointer, expected, bytes) {
            Ok(is_old) => Ok(Written::Done { is_old }),
            Err(ClientError::Refused(Refused::Changed)) => Ok(Written::Changed),
            Err(ClientError::Refused(Refused::NoObject)) => Ok(Written::Gone),
            Err(error) => Err(error),
        }
    }

    fn free(&mut self, pointer: Pointer) -> Result<(), ClientError> {
        match HeapClient::free(self, pointer) {
            Err(ClientError::Refused(Refused::NoObject)) => Ok(()),
            result => result,
        }
    }

    fn is_of_class(&self, pointer: Pointer, bytes: usize) -> bool {
        let class = u32::try_from(bytes).ok().and_then(|bytes| Classes::standard().class_for(bytes));
        class == Some(pointer.class)
    }
}
