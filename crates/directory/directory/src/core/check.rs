//! Checks of a request that do not depend on the state.

use std::collections::BTreeSet;

use crate::clock::saturating_ms;
use crate::error::{DirectoryError, LimitKind};
use crate::model::{KeyOperation, Transaction, limits};

/// Checks that `got` is at most `most`.
///
/// # Errors
/// [`DirectoryError::Limit`].
pub fn limit(kind: LimitKind, got: usize, most: usize) -> Result<(), DirectoryError> {
    if got <= most {
        return Ok(());
    }
    Err(DirectoryError::Limit { kind, got: u64::try_from(got).unwrap_or(u64::MAX) })
}

/// Checks that a key is not empty, not too long, and has no control characters.
///
/// # Errors
/// [`DirectoryError::InvalidKey`] or [`DirectoryError::Limit`].
pub fn key(key: &str) -> Result<(), DirectoryError> {
    if key.is_empty() {
        return Err(DirectoryError::InvalidKey { key: String::new(), why: "it is empty".to_owned() });
    }
    prefix(key)
}

/// Checks that a prefix is not too long, and has no control characters.
///
/// # Errors
/// [`DirectoryError::InvalidKey`] or [`DirectoryError::Limit`].
pub fn prefix(prefix: &str) -> Result<(), DirectoryError> {
    limit(LimitKind::KeyBytes, prefix.len(), limits::KEY_BYTES_MAX)?;
    if prefix.chars().any(char::is_control) {
        let why = "it has control characters".to_owned();
        return Err(DirectoryError::InvalidKey { key: prefix.to_owned(), why });
    }
    Ok(())
}

/// Checks that a time to live is between [`limits::TTL_MIN`] and [`limits::TTL_MAX`].
///
/// # Errors
/// [`DirectoryError::Limit`].
pub fn ttl(ttl_ms: u64) -> Result<(), DirectoryError> {
    if ttl_ms < saturating_ms(limits::TTL_MIN) {
        return Err(DirectoryError::Limit { kind: LimitKind::TtlMin, got: ttl_ms });
    }
    if ttl_ms > saturating_ms(limits::TTL_MAX) {
        return Err(DirectoryError::Limit { kind: LimitKind::TtlMax, got: ttl_ms });
    }
    Ok(())
}

/// Checks that a transaction is within all limits, and changes no key twice.
///
/// # Errors
/// [`DirectoryError::InvalidKey`], [`DirectoryError::Limit`] or [`DirectoryError::ChangedTwice`].
pub fn transaction(transaction: &Transaction) -> Result<(), DirectoryError> {
    let parts = transaction.compares.len() + transaction.operations.len();
    limit(LimitKind::TransactionParts, parts, limits::TRANSACTION_PARTS_MAX)?;
    let mut bytes = 0;
    for compare in &transaction.compares {
        key(&compare.key)?;
        bytes += compare.key.len();
    }
    let mut changed = BTreeSet::new();
    for operation in &transaction.operations {
        key(operation.key())?;
        bytes += operation.key().len();
        if let KeyOperation::Put { value, .. } = operation {
            limit(LimitKind::ValueBytes, value.len(), limits::VALUE_BYTES_MAX)?;
            bytes += value.len();
        }
        if !changed.insert(operation.key()) {
            return Err(DirectoryError::ChangedTwice { key: operation.key().to_owned() });
        }
    }
    limit(LimitKind::TransactionBytes, bytes, limits::TRANSACTION_BYTES_MAX)
}
