//! The catalog in the heap's root object: the stores of the heap by name.

use aquifer_objects::pointer::Pointer;

use crate::layout::{POINTER_BYTES, pointer_at, put_pointer};
use crate::objects::{Objects, Written};
use crate::store::KvError;

/// Bytes of the root object.
const CATALOG_BYTES: u32 = 4000;
const HEAD_BYTES: usize = 16;
/// Maximum length of a store's name in bytes.
pub const NAME_BYTES_MAX: usize = 48;
const ENTRY_BYTES: usize = NAME_BYTES_MAX + POINTER_BYTES;
/// Maximum number of stores of one heap.
pub const STORES_MAX: usize = (CATALOG_BYTES as usize - HEAD_BYTES) / ENTRY_BYTES;

/// The catalog of a heap at the time of its read.
#[derive(Debug)]
pub struct Catalog {
    pointer: Pointer,
    version: u64,
    /// Names of the stores, and pointers to their heads.
    pub stores: Vec<(String, Pointer)>,
}

/// Whether the name is valid for a store: 1 to 48 bytes, without control characters.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains(char::is_control)
}

impl Catalog {
    /// Reads the catalog. Allocates an empty one if the heap has none.
    ///
    /// # Errors
    /// If the heap fails, or its root object is not a catalog.
    pub fn read<O: Objects>(objects: &mut O) -> Result<Self, KvError<O::Error>> {
        let mut pointer = objects.root(CATALOG_BYTES).map_err(KvError::Objects)?;
        let mut bytes = Vec::new();
        if !objects.read(&mut pointer, &mut bytes).map_err(KvError::Objects)? {
            return Err(KvError::Damaged);
        }
        let (version, stores) = decode(&bytes).ok_or(KvError::OtherRoot)?;
        Ok(Self { pointer, version, stores })
    }

    /// Writes the catalog, unless it was changed since it was read. Returns whether it was written.
    ///
    /// # Errors
    /// If there are too many stores, or the heap fails.
    pub fn write<O: Objects>(mut self, objects: &mut O) -> Result<bool, KvError<O::Error>> {
        if self.stores.len() > STORES_MAX {
            return Err(KvError::TooManyStores);
        }
        let bytes = encode(self.version.wrapping_add(1), &self.stores);
        let written = objects.write_if(&mut self.pointer, self.version, &bytes).map_err(KvError::Objects)?;
        Ok(matches!(written, Written::Done { .. }))
    }
}

fn encode(version: u64, stores: &[(String, Pointer)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD_BYTES + stores.len() * ENTRY_BYTES);
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&(stores.len() as u64).to_le_bytes());
    for (name, head) in stores {
        bytes.extend_from_slice(name.as_bytes());
        bytes.resize(bytes.len() + NAME_BYTES_MAX - name.len(), 0);
        put_pointer(&mut bytes, Some(*head));
    }
    bytes
}

fn decode(bytes: &[u8]) -> Option<(u64, Vec<(String, Pointer)>)> {
    let (version, rest) = bytes.split_first_chunk::<8>()?;
    let (count, rest) = rest.split_first_chunk::<8>()?;
    let count = usize::try_from(u64::from_le_bytes(*count)).ok().filter(|count| *count <= STORES_MAX)?;
    let store = |entry: &[u8]| {
        let (name, _) = entry.split_at(NAME_BYTES_MAX);
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES_MAX);
        let name = std::str::from_utf8(&name[..end]).ok().filter(|name| is_name(name))?;
        Some((name.to_owned(), pointer_at(entry, NAME_BYTES_MAX)?))
    };
    let stores: Vec<_> = rest.chunks_exact(ENTRY_BYTES).take(count).map(store).collect::<Option<_>>()?;
    (stores.len() == count).then_some((u64::from_le_bytes(*version), stores))
}

#[cfg(test)]
mod tests {
    use aquifer_objects::class::ClassId;
    use aquifer_objects::header::ObjectNumber;

    use super::*;

    #[test]
    fn golden_catalog() {
        let number = ObjectNumber::new(5).unwrap();
        let pointer = Pointer { node: 1, heap: 2, class: ClassId(3), address: 0x40, number };
        let stores = vec![("cache".to_owned(), pointer)];
        let bytes = encode(3, &stores);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("6361636865{}", "0".repeat(86));
        assert_eq!(hex, format!("03000000000000000100000000000000{name}40000000000002000500000000301000"));
        assert_eq!(decode(&bytes), Some((3, stores)));
        assert_eq!(decode(&[0; 64]), Some((0, Vec::new())), "a new root object");
        assert_eq!(decode(&bytes[..70]), None);
        assert!(!is_name("") && !is_name("a\nb") && !is_name(&"x".repeat(49)) && is_name("x y"));
    }
}
