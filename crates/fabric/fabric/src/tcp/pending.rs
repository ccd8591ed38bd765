//! Unfinished handshakes, whose number is bounded.
//!
//! A peer that sends nothing must not keep others out. So the oldest unfinished handshake is ended
//! at the limit: first of the same address, then of all.

use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;

use parking_lot::Mutex;

/// All unfinished handshakes of a target. One address has at most half of the limit.
#[derive(Clone, Debug)]
pub(super) struct PendingHandshakes(Arc<Mutex<Handshakes<TcpStream>>>);

/// Handshakes in the order in which they began.
#[derive(Debug)]
struct Handshakes<S> {
    next: u64,
    open: Vec<(u64, IpAddr, S)>,
    limit: usize,
}

impl<S> Handshakes<S> {
    fn new(limit: usize) -> Self {
        Self { next: 0, open: Vec::new(), limit }
    }

    /// Adds a handshake. Returns its number, and the handshake that it displaces.
    fn begin(&mut self, address: IpAddr, stream: S) -> (u64, Option<S>) {
        let is_same = |(_, other, _): &(u64, IpAddr, S)| *other == address;
        let of_address = self.open.iter().filter(|open| is_same(open)).count();
        let displaced = if of_address >= self.limit / 2 {
            self.open.iter().position(is_same)
        } else {
            (self.open.len() >= self.limit).then_some(0)
        };
        let displaced = displaced.map(|at| self.open.remove(at).2);
        let number = self.next;
        self.next += 1;
        self.open.push((number, address, stream));
        (number, displaced)
    }

    fn end(&mut self, number: u64) {
        self.open.retain(|(other, ..)| *other != number);
    }
}

/// Counts an unfinished handshake until it is dropped.
#[derive(Debug)]
pub(super) struct PendingHandshake {
    all: PendingHandshakes,
    number: u64,
}

impl Drop for PendingHandshake {
    fn drop(&mut self) {
        self.all.0.lock().end(self.number);
    }
}

impl PendingHandshakes {
    /// Creates an empty set of at most `limit` handshakes.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Mutex::new(Handshakes::new(limit))))
    }

    /// Counts the handshake of a new connection, and ends another one at the limit.
    ///
    /// # Errors
    /// If there is no descriptor.
    pub fn begin(&self, stream: &TcpStream, address: IpAddr) -> std::io::Result<PendingHandshake> {
        let copy = stream.try_clone()?;
        let (number, displaced) = self.0.lock().begin(address, copy);
        if let Some(displaced) = displaced {
            tracing::warn!(%address, "ended an unfinished handshake: their limit is reached");
            // Its thread reads the end and closes the connection. It may just have done so.
            let _ = displaced.shutdown(Shutdown::Both);
        }
        Ok(PendingHandshake { all: self.clone(), number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::PENDING_LIMIT;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn an_address_displaces_its_own_oldest_handshake() {
        let mut handshakes = Handshakes::new(PENDING_LIMIT);
        assert_eq!(handshakes.begin(address(1), 1000).1, None);
        for number in 0..PENDING_LIMIT / 2 {
            assert_eq!(handshakes.begin(address(2), number).1, None);
        }
        assert_eq!(handshakes.begin(address(2), 2000).1, Some(0));
        assert_eq!(handshakes.begin(address(2), 2001).1, Some(1));
        assert_eq!(handshakes.begin(address(1), 1001).1, None);
    }

    #[test]
    fn many_addresses_displace_the_oldest_handshake_of_all() {
        let mut handshakes = Handshakes::new(PENDING_LIMIT);
        let numbers: Vec<u64> = (0..PENDING_LIMIT)
            .map(|number| handshakes.begin(address(u8::try_from(number).unwrap()), number).0)
            .collect();
        assert_eq!(handshakes.begin(address(200), 7).1, Some(0));
        handshakes.end(numbers[1]);
        assert_eq!(handshakes.begin(address(201), 8).1, None, "one has ended");
        assert_eq!(handshakes.begin(address(202), 9).1, Some(2));
    }
}
