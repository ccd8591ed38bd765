//! What the next process of an agent must know of a segment, in the segment's own memory: that
//! outlives the process, because the keeper holds it.
//!
//! There are two slots, which are written in turn. A slot that was being written when the process
//! was killed does not have its checksum, and the other one counts.

use aquifer_fabric::Memory;
use serde::{Deserialize, Serialize};

use super::programs::ProcessIdentity;
use super::wire::CopyPlace;
use aquifer_ownership::Holder;

const SLOT_BYTES: usize = 16 << 10;
const HEAD_BYTES: usize = 16;
/// Bytes of the journal.
pub(super) const JOURNAL_BYTES: usize = 2 * SLOT_BYTES;

/// A segment at this host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JournalEntry {
    /// How it is held.
    pub holder: Holder,
    /// The copies, the newest first.
    pub copies: Vec<CopyPlace>,
    /// The generation of each map of pages that are present.
    pub maps: Vec<Option<u64>>,
    /// Its first address in the arena.
    pub address: u64,
    /// The process that owns it, or is to own it.
    pub process: String,
    /// The same process, while it runs.
    pub identity: Option<ProcessIdentity>,
    /// How often it was passed on between processes of this host.
    #[serde(default)]
    pub passes: u64,
}

/// Writes an entry at `at`, in the place of the one before the last. `sequence` is that of the last
/// one.
pub(super) fn write(memory: &Memory, at: usize, sequence: &mut u64, entry: &JournalEntry) {
    let json = serde_json::to_vec(entry).unwrap_or_default();
    if json.len() > SLOT_BYTES - HEAD_BYTES {
        return tracing::error!(bytes = json.len(), "a segment's record is too long to outlive the agent");
    }
    *sequence += 1;
    let slot = at + usize::from(!sequence.is_multiple_of(2)) * SLOT_BYTES;
    memory.write(slot + HEAD_BYTES, &json);
    let len = u32::try_from(json.len()).expect("it is shorter than a slot");
    memory.write(slot, &[sequence.to_le_bytes(), head_word(len, &json, *sequence)].concat());
}

/// Reads the last entry that was written whole, with its sequence.
pub(super) fn read(memory: &Memory, at: usize) -> Option<(u64, JournalEntry)> {
    let slots = [at, at + SLOT_BYTES].map(|slot| {
        let mut head = [0; HEAD_BYTES];
        memory.read(slot, &mut head);
        let sequence = u64::from_le_bytes(*head.first_chunk()?);
        let len = u32::from_le_bytes(head[8..12].try_into().ok()?);
        let mut json = vec![0; (len as usize).min(SLOT_BYTES - HEAD_BYTES)];
        memory.read(slot + HEAD_BYTES, &mut json);
        let is_whole = head[8..] == head_word(len, &json, sequence);
        let entry = if is_whole { serde_json::from_slice(&json).ok() } else { None };
        entry.map(|entry| (sequence, entry))
    });
    slots.into_iter().flatten().max_by_key(|(sequence, _)| *sequence)
}

/// The length, and a checksum of all.
fn head_word(len: u32, json: &[u8], sequence: u64) -> [u8; 8] {
    let (sequence, len) = (sequence.to_le_bytes(), len.to_le_bytes());
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &[&sequence, &len[..], json].concat());
    let sum = u32::try_from(sum).expect("it has 32 bits").to_le_bytes();
    [len[0], len[1], len[2], len[3], sum[0], sum[1], sum[2], sum[3]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_ownership::Life;

    fn entry(address: u64) -> JournalEntry {
        let holder = Holder::owner(Life { host: 1, epoch: 2 }, 3);
        let (copies, maps) = (Vec::new(), vec![Some(3), None]);
        JournalEntry { holder, copies, maps, address, process: "p".into(), identity: None, passes: 4 }
    }

    #[test]
    fn the_last_entry_that_is_whole_counts() {
        let memory = Memory::create("aquifer-test", 4096 + JOURNAL_BYTES).unwrap();
        assert_eq!(read(&memory, 4096), None);
        let mut sequence = 0;
        for address in 1..6 {
            write(&memory, 4096, &mut sequence, &entry(address));
            assert_eq!(read(&memory, 4096), Some((address, entry(address))));
        }
        // The process was killed while it wrote the sixth.
        for len in 0..40 {
            let slot = 4096;
            memory.write(slot, &vec![0xee; len]);
            let (found, found_entry) = read(&memory, 4096).unwrap();
            assert!(found >= 4 && found_entry == entry(found), "{len} bytes");
        }
        memory.write(4096 + SLOT_BYTES, &[0xff; HEAD_BYTES]);
        assert_eq!(read(&memory, 4096), None);
    }

    #[test]
    fn golden_entry() {
        let holder = r#"{"own":{"host":1,"epoch":2},"holding":{"Owned":{"generation":3,"stage":"Settled"}},"#;
        let counts = r#""decided":3,"received":0},"copies":[],"maps":[3,null],"address":8192,"#;
        let json = [r#"{"holder":"#, holder, counts, r#""process":"p","identity":null,"passes":4}"#].concat();
        assert_eq!(serde_json::to_string(&entry(8192)).unwrap(), json);
        assert_eq!(serde_json::from_str::<JournalEntry>(&json).unwrap(), entry(8192));
    }
}
