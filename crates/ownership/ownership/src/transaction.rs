//! Transactions of hand-overs in the directory.

use aquifer_directory::{Compare, Directory, DirectoryError, KeyOperation, Transaction, names};

use crate::{Change, Life, Retraction, SegmentRecord};

/// Attempts at a transaction while other hosts change the same record.
const ATTEMPTS_MAX: u32 = 16;

/// Carries out a transaction on the record with this key. Returns whether it was carried out.
///
/// `life_of` returns whether a life lasts, and adds compares that fail when that changes.
///
/// # Errors
/// Errors of the directory. The transaction may have been carried out.
pub fn carry_out(
    directory: &dyn Directory,
    key: &str,
    change: &Change,
    life_of: impl Fn(Life, &mut Vec<Compare>) -> Result<bool, DirectoryError>,
) -> Result<bool, DirectoryError> {
    for _ in 0..ATTEMPTS_MAX {
        let Some(entry) = directory.get(key)? else { return Ok(false) };
        let mut record: SegmentRecord = names::decode(&entry)?;
        let mut compares = vec![Compare::version(key, entry.version)];
        let (author, fenced) = match *change {
            Change::Intend { owner, .. } => (owner, None),
            Change::Confirm { to, .. } => (to, None),
            Change::Retract { owner, because: Retraction::Refused, .. } => (owner, None),
            Change::Retract { owner, because: Retraction::Fenced, .. } => (owner, record.intent),
        };
        let mut lives = vec![(author, life_of(author, &mut compares)?)];
        if let Some(target) = fenced {
            lives.push((target, life_of(target, &mut compares)?));
        }
        let lives = |life: Life| lives.iter().any(|(other, lives)| *other == life && *lives);
        if !record.apply(change, lives) {
            return Ok(false);
        }
        let operations = vec![KeyOperation::put(key, names::encode(&record), None)];
        if directory.transaction(&Transaction { compares, operations })?.is_committed() {
            return Ok(true);
        }
    }
    Ok(false)
}
