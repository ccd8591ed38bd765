//! Records of runs and programs that the keeper holds beside their descriptors.
//!
//! Records are JSON, because the agent that reads them may be of another build. The keys are part
//! of the format in `docs/formats/ipc.md`.

use std::io;

use aquifer_ipc::{HeldItem, HeldKind, ProgramHello, RunToken};
use aquifer_pager::PAGE_BYTES;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::canary::{Canary, Nonce};
use crate::maps::PagingBounds;

/// Record of a run; the keeper holds it with the memory of its slabs, the owner's socket, and the
/// owner's pidfd if there is one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// The token in hexadecimal digits.
    pub token: String,
    pub name: String,
    pub limit_bytes: u64,
    /// See [`aquifer_ipc::OpenRun::limit_max_bytes`]; `None` if it is `limit_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_max_bytes: Option<u64>,
    /// User that the run belongs to.
    pub tenant: u32,
    /// The number of the run's policy of copies; without backups, that of its replicas.
    #[serde(rename = "replicas")]
    pub copies: usize,
    /// See [`aquifer_ipc::OpenRun::outlives_owner`].
    pub outlives_owner: bool,
    /// See [`aquifer_ipc::OpenRun::is_strict`].
    #[serde(default)]
    pub is_strict: bool,
    /// See [`aquifer_ipc::OpenRun::wait_for_room_ms`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_for_room_ms: Option<u64>,
    /// Process id of the owner; `None` in records of earlier builds, for which the socket's peer is
    /// the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_pid: Option<u32>,
}

/// Record of a program.
///
/// The keeper holds it with these descriptors, in order: the userfaultfd, the page table and the
/// journal; after the hello, the control memory and the program's socket; and those of a process
/// that is identified, the pidfd last.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct ProgramRecord {
    /// Number of the run.
    pub run: u64,
    /// Number of the parent of a forked child, and the parent's count of applied events at the
    /// fork.
    pub origin: Option<(u64, u64)>,
    /// Start and end of the shim's memory, and address of the canary page.
    pub private: [u64; 3],
    /// The nonce of the canary.
    pub nonce: Nonce,
    /// Start and end of the only range that is paged; both 0 if all areas can be paged.
    #[serde(default)]
    pub only: [u64; 2],
    /// Whether the program is a forked child whose inherited memory was not checked yet.
    #[serde(default)]
    pub must_check_inheritance: bool,
    pub hello: Option<HelloRecord>,
}

/// The fields of a program's hello, except the ranges.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct HelloRecord {
    pub is_child: bool,
    pub bounce_buffer: u64,
    pub staging: u64,
}

impl RunRecord {
    pub fn put(&self, id: u64) -> HeldItem {
        HeldItem { kind: HeldKind::Run, id, pid: 0, uid: self.tenant, record: encode(self) }
    }

    pub fn token(&self) -> io::Result<RunToken> {
        RunToken::from_hex(self.token.as_bytes())
            .ok_or_else(|| io::Error::other("the token in its record is invalid"))
    }
}

impl ProgramRecord {
    pub fn put(&self, id: u64, pid: u32, uid: u32) -> HeldItem {
        HeldItem { kind: HeldKind::Program, id, pid, uid, record: encode(self) }
    }

    /// Returns the hello of the program; `None` if it has not sent one.
    pub fn hello(&self, token: RunToken) -> Option<ProgramHello> {
        let HelloRecord { is_child, bounce_buffer, staging } = self.hello?;
        let PagingBounds { shim_range, canary, paged_range } = self.bounds();
        Some(ProgramHello {
            token,
            is_child,
            // The number only identifies a child before its hello.
            child_number: 0,
            bounce_buffer,
            staging,
            canary,
            private_start: shim_range.start,
            private_end: shim_range.end,
            paged_start: paged_range.start,
            paged_end: paged_range.end,
        })
    }

    /// Returns the canary of the program with number `id`.
    pub fn canary(&self, id: u64) -> Canary {
        Canary { page: self.private[2] / PAGE_BYTES as u64, number: id, nonce: self.nonce }
    }

    pub fn bounds(&self) -> PagingBounds {
        let [start, end, canary] = self.private;
        PagingBounds { shim_range: start..end, canary, paged_range: self.only[0]..self.only[1] }
    }
}

impl From<&ProgramHello> for HelloRecord {
    fn from(hello: &ProgramHello) -> Self {
        Self { is_child: hello.is_child, bounce_buffer: hello.bounce_buffer, staging: hello.staging }
    }
}

fn encode(record: &impl Serialize) -> String {
    serde_json::to_string(record).expect("plain structs are JSON")
}

/// Parses a record that another agent has written.
pub(crate) fn decode<T: DeserializeOwned>(put: &HeldItem) -> io::Result<T> {
    serde_json::from_str(&put.record).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_the_same_after_a_restart() {
        let hello = ProgramHello {
            token: RunToken([3; 16]),
            is_child: true,
            child_number: 0,
            bounce_buffer: 0x1000,
            staging: 0x2000,
            canary: 0x3000,
            private_start: 0x4000,
            private_end: 0x9000,
            paged_start: 0x10_0000,
            paged_end: 0x20_0000,
        };
        let record = ProgramRecord {
            run: 1,
            origin: None,
            private: [hello.private_start, hello.private_end, hello.canary],
            nonce: [6; 16],
            only: [hello.paged_start, hello.paged_end],
            must_check_inheritance: false,
            hello: Some(HelloRecord::from(&hello)),
        };
        let back: ProgramRecord = decode(&record.put(7, 8, 9)).unwrap();
        assert_eq!(back.hello(hello.token), Some(hello));
    }

    #[test]
    fn a_record_without_a_range_means_that_all_areas_are_paged() {
        let text = r#"{"run":1,"origin":null,"private":[4096,8192,12288],
            "nonce":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15],"hello":null}"#;
        let put = HeldItem { kind: HeldKind::Program, id: 7, pid: 8, uid: 9, record: text.into() };
        let record: ProgramRecord = decode(&put).unwrap();
        assert_eq!(
            record.bounds(),
            PagingBounds { shim_range: 4096..8192, canary: 12288, paged_range: 0..0 }
        );
    }
}
