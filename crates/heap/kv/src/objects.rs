//! The interface between a store and its heap of objects.

use aquifer_objects::class::Classes;
use aquifer_objects::client::{ClientError, DirectRead, HeapClient};
use aquifer_objects::pointer::Pointer;
use aquifer_objects::wire::Refused;

/// The outcome of a conditional write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    /// The object was written.
    Done {
        /// Whether the pointer has the address of a merged block, which it keeps in use.
        is_old: bool,
    },
    /// The object's first word was not the expected one. The object is unchanged.
    Changed,
    /// The object does not exist.
    Gone,
}

/// The operations of a heap that a store uses.
pub trait Objects {
    /// The error of an operation. It may have taken effect.
    type Error: std::error::Error;

    /// Returns the root object of the heap, or allocates it: at least `bytes` bytes of zeros.
    ///
    /// # Errors
    /// If the heap fails.
    fn root(&mut self, bytes: u32) -> Result<Pointer, Self::Error>;

    /// Allocates an object with these bytes.
    ///
    /// # Errors
    /// If the heap fails.
    fn create(&mut self, contents: &[u8]) -> Result<Pointer, Self::Error>;

    /// Reads a whole object, up to the end of its slot. Returns whether the object exists.
    ///
    /// # Errors
    /// If the heap fails.
    fn read(&mut self, pointer: &mut Pointer, out: &mut Vec<u8>) -> Result<bool, Self::Error>;

    /// Reads several objects, as [`Self::read`]. Returns whether all exist; otherwise no bytes are
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

    /// Frees an object, if it exists.
    ///
    /// # Errors
    /// If the heap fails.
    fn free(&mut self, pointer: Pointer) -> Result<(), Self::Error>;

    /// Whether an object of `bytes` bytes has the size class of this one.
    fn is_of_class(&self, pointer: Pointer, bytes: usize) -> bool;
}

/// The length in bytes of a pointer's object, by its size class.
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
