//! RPC server of the peer: a buddy allocator with a free list for each size, which clients call by
//! messages.

use std::collections::{BTreeSet, HashMap};

use aquifer_fabric::{Access, Identity, Key, Scope, Target, WindowSpec};
use aquifer_pool::SizeClass;
use aquifer_pool::size::{CHUNK_BYTES, SECTION_CHUNKS};

/// Length of a request and of an answer.
pub const MESSAGE_BYTES: usize = 16;
/// Chunk in an answer that refuses the request.
const REFUSED: u64 = u64::MAX;

/// A request to the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Allocate an extent, with or without a window.
    Allocate { class: SizeClass, window: bool },
    /// Free an extent.
    Free { chunk: u32, class: SizeClass },
}

impl Request {
    /// Writes the request as a message.
    pub fn encode(self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        match self {
            Self::Allocate { class, window } => bytes[..3].copy_from_slice(&[1, class.k(), u8::from(window)]),
            Self::Free { chunk, class } => {
                bytes[..2].copy_from_slice(&[2, class.k()]);
                bytes[8..12].copy_from_slice(&chunk.to_le_bytes());
            }
        }
        bytes
    }

    /// Parses a message; `None` if it is not valid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
        let class = SizeClass::new(bytes[1])?;
        match bytes[0] {
            1 => Some(Self::Allocate { class, window: bytes[2] != 0 }),
            2 => {
                let chunk = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
                Some(Self::Free { chunk, class })
            }
            _ => None,
        }
    }
}

/// A granted extent: its first chunk and its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Granted {
    pub chunk: u32,
    pub key: Key,
}

/// Writes an answer as a message.
pub fn encode_answer(granted: Option<Granted>) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    let chunk = granted.map_or(REFUSED, |granted| u64::from(granted.chunk));
    bytes[..8].copy_from_slice(&chunk.to_le_bytes());
    bytes[8..12].copy_from_slice(&granted.map_or(0, |granted| granted.key.0).to_le_bytes());
    bytes
}

/// Parses an answer; `None` if it is a refusal, or not valid.
pub fn decode_answer(bytes: &[u8]) -> Option<Granted> {
    let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
    let (chunk, rest) = bytes.split_first_chunk::<8>()?;
    let key = Key(u32::from_le_bytes(*rest.first_chunk()?));
    Some(Granted { chunk: u32::try_from(u64::from_le_bytes(*chunk)).ok()?, key })
}

/// Free extents by size.
#[derive(Debug)]
pub struct Buddies([BTreeSet<u32>; SizeClass::COUNT as usize]);

impl Buddies {
    /// Free lists of this number of free sections.
    pub fn new(sections: u32) -> Self {
        let mut free: [BTreeSet<u32>; SizeClass::COUNT as usize] = Default::default();
        free[usize::from(SizeClass::SECTION.k())] =
            (0..sections).map(|section| section * SECTION_CHUNKS).collect();
        Self(free)
    }

    /// Removes and returns a free extent of this size. Splits a larger one if there is none.
    pub fn pop(&mut self, class: SizeClass) -> Option<u32> {
        let wanted = usize::from(class.k());
        let larger = (wanted..self.0.len()).find(|k| !self.0[*k].is_empty())?;
        let chunk = self.0[larger].pop_first()?;
        for k in wanted..larger {
            self.0[k].insert(chunk + (1 << k));
        }
        Some(chunk)
    }

    /// Adds a free extent, and joins it with its free buddies.
    pub fn push(&mut self, mut chunk: u32, class: SizeClass) {
        let mut k = usize::from(class.k());
        while k < usize::from(SizeClass::SECTION.k()) && self.0[k].remove(&(chunk ^ (1 << k))) {
            chunk &= !(1 << k);
            k += 1;
        }
        self.0[k].insert(chunk);
    }
}

/// A freed extent whose window may still be in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retired {
    pub chunk: u32,
    pub class: SizeClass,
    pub key: Key,
}

/// The RPC server of one target.
#[derive(Debug)]
pub struct RpcServer {
    free: Buddies,
    /// Allocated extents: size, and window if one was bound.
    allocated: HashMap<u32, (SizeClass, Option<Key>)>,
    /// Address and key of all memory.
    base: u64,
    key: Key,
}

impl RpcServer {
    /// A server for sections from an address on.
    pub fn new(sections: u32, base: u64, key: Key) -> Self {
        Self { free: Buddies::new(sections), allocated: HashMap::new(), base, key }
    }

    /// Carries out a request. Returns the answer, and an extent whose window must be invalidated
    /// before the extent is [`Self::reuse`]d.
    pub fn answer(
        &mut self,
        target: &dyn Target,
        who: Identity,
        asked: &[u8],
    ) -> ([u8; MESSAGE_BYTES], Option<Retired>) {
        let (granted, retired) = match Request::decode(asked) {
            Some(Request::Allocate { class, window }) => (self.allocate(target, who, class, window), None),
            Some(Request::Free { chunk, class }) => self.free(chunk, class),
            None => (None, None),
        };
        (encode_answer(granted), retired)
    }

    /// Frees an extent whose window was invalidated.
    pub fn reuse(&mut self, retired: Retired) {
        self.free.push(retired.chunk, retired.class);
    }

    fn allocate(
        &mut self,
        target: &dyn Target,
        who: Identity,
        class: SizeClass,
        window: bool,
    ) -> Option<Granted> {
        let chunk = self.free.pop(class)?;
        let mut key = None;
        if window {
            let first = self.base + u64::from(chunk) * CHUNK_BYTES;
            let range = first..first + class.bytes();
            let spec = WindowSpec { range, access: Access::READ_WRITE, scope: Scope::Tenant(who.tenant) };
            match target.bind(&spec) {
                Ok(bound) => key = Some(bound),
                Err(_) => {
                    self.free.push(chunk, class);
                    return None;
                }
            }
        }
        self.allocated.insert(chunk, (class, key));
        Some(Granted { chunk, key: key.unwrap_or(self.key) })
    }

    fn free(&mut self, chunk: u32, class: SizeClass) -> (Option<Granted>, Option<Retired>) {
        let Some((allocated, key)) = self.allocated.remove(&chunk) else { return (None, None) };
        if allocated != class {
            self.allocated.insert(chunk, (allocated, key));
            return (None, None);
        }
        let retired = key.map(|key| Retired { chunk, class, key });
        if retired.is_none() {
            self.free.push(chunk, class);
        }
        (Some(Granted { chunk, key: Key(0) }), retired)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_and_answers_are_read_as_they_were_written() {
        let class = SizeClass::new(7).unwrap();
        for request in [
            Request::Allocate { class, window: true },
            Request::Allocate { class, window: false },
            Request::Free { chunk: 0x0102_0304, class },
        ] {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
        let granted = Granted { chunk: 9, key: Key(7) };
        assert_eq!(decode_answer(&encode_answer(Some(granted))), Some(granted));
        assert_eq!(decode_answer(&encode_answer(None)), None);
        for nonsense in [&[][..], &[3; 16], &[1, 10, 0], &[1; 17]] {
            assert_eq!(Request::decode(nonsense), None);
        }
    }

    proptest! {
        #[test]
        fn no_chunk_is_allocated_twice_and_all_join_again(
            requests in prop::collection::vec((0..SizeClass::COUNT, any::<u16>()), 1..200)
        ) {
            let mut free = Buddies::new(3);
            let mut held: Vec<(u32, SizeClass)> = Vec::new();
            let mut allocated = vec![false; 3 * SECTION_CHUNKS as usize];
            for (k, at) in requests {
                let class = SizeClass::new(k).unwrap();
                if at % 3 == 0 && !held.is_empty() {
                    let (chunk, class) = held.swap_remove(usize::from(at) % held.len());
                    (chunk..chunk + class.chunks()).for_each(|chunk| allocated[chunk as usize] = false);
                    free.push(chunk, class);
                } else if let Some(chunk) = free.pop(class) {
                    prop_assert_eq!(chunk % class.chunks(), 0);
                    for chunk in chunk..chunk + class.chunks() {
                        prop_assert!(!std::mem::replace(&mut allocated[chunk as usize], true));
                    }
                    held.push((chunk, class));
                }
            }
            held.into_iter().for_each(|(chunk, class)| free.push(chunk, class));
            prop_assert_eq!(free.0[usize::from(SizeClass::SECTION.k())].len(), 3);
        }
    }
}
