//! The journal of a segment: the state that the next process of an agent needs. The segment's own
//! memory has the journal, so it outlives the agent's process: the keeper holds that memory.
//!
//! The journal has two slots, which are written in turn. If the process was killed while it wrote a
//! slot, the checksum of that slot does not match, and the other slot has the last entry.

use aquifer_fabric::Memory;
use serde::{Deserialize, Serialize};

use super::programs::ProcessIdentity;
use super::wire::CopyPlace;
use aquifer_ownership::Holder;

const SLOT_BYTES: usize = 16 << 10;
const HEAD_BYTES: usize = 16;
/// Bytes of the journal.
pub(super) const JOURNAL_BYTES: usize = 2 * SLOT_BYTES;

/// The state of a segment at this host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JournalEntry {
    /// The state of the hand-over protocol.
    pub holder: Holder,
    /// The copies, the newest first.
    pub copies: Vec<CopyPlace>,
    /// The generation of each map of pages that are present.
    pub maps: Vec<Option<u64>>,
    /// The segment's first address in the arena.
    pub address: u64,
    /// The name of the process that owns the segment, or is to own it.
    pub process: String,
    /// The identity of this process, if the agent could see it.
    pub identity: Option<ProcessIdentity>,
    /// Number of hand-overs of the segment between processes of this host.
    #[serde(default)]
    pub passes: u64,
}

/// Writes an entry into the slot of the entry before the last one. The journal begins at `at`, and
/// `sequence` is the number of the last entry.
pub(super) fn write(memory: &Memory, at: usize, sequence: &mut u64, entry: &JournalEntry) {
    let json = serde_json::to_vec(entry).unwrap_or_default();
    if json.len() > SLOT_BYTES - HEAD_BYTES {
        return tracing::error!(
            bytes = json.len(),
            "cannot journal a segment: its entry is too long, and a restarted agent uses an older one"
        );
    }
    *sequence += 1;
    let slot = at + usize::from(!sequence.is_multiple_of(2)) * SLOT_BYTES;
    memory.write(slot + HEAD_BYTES, &json);
    let len = u32::try_from(json.len()).expect("an entry is shorter than a slot");
    memory.write(slot, &[sequence.to_le_bytes(), head_word(len, &json, *sequence)].concat());
}

/// Reads the last entry with a valid checksum, and its sequence number.
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

/// The last 8 bytes of a slot's head: the length, and a checksum of sequence, length and entry.
fn head_word(len: u32, json: &[u8], sequence: u64) -> [u8; 8] {
    let (sequence, len) = (sequence.to_le_bytes(), len.to_le_bytes());
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &[&sequence, &len[..], json].concat());
    let sum = u32::try_from(sum).expect("the checksum has 32 bits").to_le_bytes();
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
    fn the_last_entry_with_a_valid_checksum_is_read() {
        let memory = Memory::create("aquifer-test", 4096 + JOURNAL_BYTES).unwrap();
        assert_eq!(read(&memory, 4096), None);
        let mut sequence = 0;
        for address in 1..6 {
            write(&memory, 4096, &mut sequence, &entry(address));
            assert_eq!(read(&memory, 4096), Some((address, entry(address))));
        }
        // The process was killed while it wrote the sixth entry.
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
