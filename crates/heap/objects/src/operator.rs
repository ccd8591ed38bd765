//! The connection of an operator to the heaps of a node: reports, compaction and limits.

use aquifer_fabric::Endpoint;

use crate::client::{ClientError, Connection, HeapLink};
use crate::service::report::HeapReport;
use crate::wire::{Answer, Refused, Request};

/// A connection of an operator.
#[derive(Debug)]
pub struct HeapOperator(Connection);

impl HeapOperator {
    /// Creates a connection over an endpoint of the tenant [`crate::service::OPERATOR`].
    ///
    /// # Errors
    /// If the endpoint cannot be used.
    pub fn new(endpoint: Box<dyn Endpoint>) -> Result<Self, ClientError> {
        Connection::new(endpoint).map(Self)
    }

    /// The reports on all heaps.
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn reports(&mut self) -> Result<Vec<HeapReport>, ClientError> {
        let (mut reports, mut from) = (Vec::<HeapReport>::new(), 0);
        loop {
            match self.0.request(&Request::Report { from }) {
                Ok(Answer::Report(json)) => {
                    let report: HeapReport = serde_json::from_slice(json).map_err(|_| ClientError::Answer)?;
                    let next = report.tenant.checked_add(1).filter(|_| report.tenant >= from);
                    from = next.ok_or(ClientError::Answer)?;
                    reports.push(report);
                }
                Err(ClientError::Refused(Refused::NoObject)) => return Ok(reports),
                Ok(_) => return Err(ClientError::Answer),
                Err(error) => return Err(error),
            }
        }
    }

    /// Compacts the heap of a tenant, until nothing can be merged. Returns the number of merges.
    ///
    /// # Errors
    /// If the connection breaks.
    pub fn compact(&mut self, tenant: u32) -> Result<u64, ClientError> {
        let mut merges = 0;
        loop {
            match self.done(&Request::Compact { tenant })? {
                0 => return Ok(merges),
                some => merges += u64::from(some),
            }
        }
    }

    /// Changes the memory limit of a tenant's heap, in bytes.
    ///
    /// # Errors
    /// If the connection breaks, or the change cannot be kept.
    pub fn set_limit(&mut self, tenant: u32, bytes: u64) -> Result<(), ClientError> {
        self.done(&Request::SetLimit { tenant, bytes }).map(drop)
    }

    fn done(&mut self, request: &Request<'_>) -> Result<u32, ClientError> {
        match self.0.request(request)? {
            Answer::Done(number) => Ok(number),
            _ => Err(ClientError::Answer),
        }
    }
}
