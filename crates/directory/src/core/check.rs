//! What a request must fulfil before the state is even looked at.

use std::collections::BTreeSet;

use crate::clock::saturating_ms;
use crate::error::{Bound, DirectoryError};
use crate::model::{Operation, Transaction, limits};

/// Refuse `got` beyond `most`.
pub fn limit(bound: Bound, got: usize, most: usize) -> Result<(), DirectoryError> {
    if got <= most {
        return Ok(());
    }
    Err(DirectoryError::Limit { bound, got: u64::try_from(got).unwrap_or(u64::MAX) })
}

/// A key must not be empty, nor too long.
///
/// # Errors
/// Names the limit.
pub fn key(key: &str) -> Result<(), DirectoryError> {
    if key.is_empty() {
        return Err(DirectoryError::InvalidKey { key: String::new(), why: "it is empty".to_owned() });
    }
    prefix(key)
}

/// A prefix must not be too long.
///
/// # Errors
/// Names the limit.
pub fn prefix(prefix: &str) -> Result<(), DirectoryError> {
    limit(Bound::KeyBytes, prefix.len(), limits::KEY_BYTES_MAX)?;
    if prefix.chars().any(char::is_control) {
        let why = "it has control characters in it".to_owned();
        return Err(DirectoryError::InvalidKey { key: prefix.to_owned(), why });
    }
    Ok(())
}

/// A time to live must be within [`limits::TTL_MIN`] and [`limits::TTL_MAX`].
///
/// # Errors
/// Names the limit.
pub fn ttl(ttl_ms: u64) -> Result<(), DirectoryError> {
    if ttl_ms < saturating_ms(limits::TTL_MIN) {
        return Err(DirectoryError::Limit { bound: Bound::TtlMin, got: ttl_ms });
    }
    if ttl_ms > saturating_ms(limits::TTL_MAX) {
        return Err(DirectoryError::Limit { bound: Bound::TtlMax, got: ttl_ms });
    }
    Ok(())
}

/// A transaction must be within all limits, and change no key twice.
///
/// # Errors
/// Names the limit.
pub fn transaction(transaction: &Transaction) -> Result<(), DirectoryError> {
    let parts = transaction.compares.len() + transaction.operations.len();
    limit(Bound::TransactionParts, parts, limits::TRANSACTION_PARTS_MAX)?;
    let mut bytes = 0;
    for compare in &transaction.compares {
        key(&compare.key)?;
        bytes += compare.key.len();
    }
    let mut changed = BTreeSet::new();
    for operation in &transaction.operations {
        key(operation.key())?;
        bytes += operation.key().len();
        if let Operation::Put { value, .. } = operation {
            limit(Bound::ValueBytes, value.len(), limits::VALUE_BYTES_MAX)?;
            bytes += value.len();
        }
        if !changed.insert(operation.key()) {
            return Err(DirectoryError::ChangedTwice { key: operation.key().to_owned() });
        }
    }
    limit(Bound::TransactionBytes, bytes, limits::TRANSACTION_BYTES_MAX)
}
