//! Routes to a heap, and the interface of a connection to one.

use aquifer_fabric::Endpoint;

use super::connection::Connection;
use super::device::DeviceLink;
use super::{ClientError, DirectRead};
use crate::access::AccessError;
use crate::pointer::Pointer;
use crate::shared::{SharedHeap, SharedLink};
use crate::slot::ReadVerdict;
use crate::wire::{Answer, Request};

/// Makes a connection to the service.
pub type Connect = Box<dyn FnMut() -> Result<HeapRoute, AccessError> + Send>;

/// A route to a heap.
#[derive(Debug)]
pub enum HeapRoute {
    /// A connection over a network.
    Remote(Box<dyn Endpoint>),
    /// A connection over a network, with reads by a device.
    Device {
        /// The endpoint for requests.
        control: Box<dyn Endpoint>,
        /// The endpoint for reads.
        device: Box<dyn Endpoint>,
    },
    /// The heap's memory on this machine.
    Shared(SharedHeap),
}

impl HeapRoute {
    pub(super) fn open(self) -> Result<Box<dyn HeapLink>, ClientError> {
        Ok(match self {
            Self::Remote(endpoint) => Box::new(Connection::open(endpoint)?),
            Self::Device { control, device } => Box::new(DeviceLink::open(control, device)?),
            Self::Shared(heap) => Box::new(SharedLink::open(heap)?),
        })
    }
}

/// A connection to a heap.
pub(crate) trait HeapLink: Send + std::fmt::Debug {
    /// Sends a request and waits for the answer.
    fn request(&mut self, request: &Request<'_>) -> Result<Answer<'_>, ClientError>;

    /// Reads an object one-sidedly, once.
    fn direct_read(&mut self, pointer: Pointer, out: &mut [u8]) -> Result<ReadVerdict, ClientError>;

    /// Reads objects one-sidedly, once each.
    fn direct_read_many(&mut self, reads: &mut [DirectRead<'_>]) -> Result<(), ClientError> {
        for read in reads {
            read.verdict = self.direct_read(read.pointer, read.out)?;
        }
        Ok(())
    }

    /// Searches the block of an object one-sidedly. Returns its pointer with the slot where it is;
    /// `None` if the object is not there, or a request is faster.
    fn find(&mut self, pointer: Pointer) -> Result<Option<Pointer>, ClientError>;

    /// Sends a request whose answer is a pointer.
    fn request_pointer(&mut self, request: &Request<'_>) -> Result<(Pointer, bool), ClientError> {
        match self.request(request)? {
            Answer::Pointer(pointer, is_old) => Ok((pointer, is_old)),
            _ => Err(ClientError::Answer),
        }
    }
}
