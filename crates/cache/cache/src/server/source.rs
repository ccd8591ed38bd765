//! Sources of the epoll events of a worker.

use rustix::event::epoll;

/// The source of an epoll event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The connection of a client at this place.
    Client(usize),
    /// The connection of another server at this place.
    Peer(usize),
    /// The link to the server with this number.
    Link(u16),
    /// The worker's waker.
    Waker,
}

impl Source {
    const KIND_SHIFT: u32 = 62;

    /// The epoll data of the source.
    pub fn data(self) -> epoll::EventData {
        let (kind, number) = match self {
            Self::Client(number) => (0, number as u64),
            Self::Peer(number) => (1, number as u64),
            Self::Link(server) => (2, u64::from(server)),
            Self::Waker => (3, 0),
        };
        epoll::EventData::new_u64(kind << Self::KIND_SHIFT | number)
    }

    /// The source with this epoll data.
    pub fn of(data: u64) -> Self {
        let number = data & ((1 << Self::KIND_SHIFT) - 1);
        let place = usize::try_from(number).expect("64 bits");
        match data >> Self::KIND_SHIFT {
            0 => Self::Client(place),
            1 => Self::Peer(place),
            2 => Self::Link(u16::try_from(number).expect("the number of a server")),
            _ => Self::Waker,
        }
    }
}
