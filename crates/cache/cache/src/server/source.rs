//! Sources of the events for which a worker waits.

use rustix::event::epoll;

/// The source of an event of the epoll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A connection of a client, at this place.
    Client(usize),
    /// A connection of another server, at this place.
    Peer(usize),
    /// The link to a server.
    Link(u16),
    /// The worker's waker.
    Waker,
}

impl Source {
    const KIND_SHIFT: u32 = 62;

    /// The data of the events of the source.
    pub fn data(self) -> epoll::EventData {
        let (kind, number) = match self {
            Self::Client(number) => (0, number as u64),
            Self::Peer(number) => (1, number as u64),
            Self::Link(server) => (2, u64::from(server)),
            Self::Waker => (3, 0),
        };
        epoll::EventData::new_u64(kind << Self::KIND_SHIFT | number)
    }

    /// The source of an event with this data.
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
