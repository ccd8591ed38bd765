//! The request of `aquifer run` for a run.

use crate::frame::{FrameError, Reader, VERSION_OLDEST, write_text};
use crate::mutation::Mutation;

/// Body of [`crate::Frame::OpenRun`]: the options of a new run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenRun {
    /// Limit of the run's resident pages and its part of the mempool together.
    pub limit_bytes: u64,
    /// Most resident pages of the run while its host has idle memory, at least `limit_bytes`;
    /// [`LIMIT_MAX_AUTO`] if the agent may choose. `None`: the agent's default.
    pub limit_max_bytes: Option<u64>,
    /// Memory nodes that hold a copy of each page, 1 to 3.
    pub replicas: u32,
    /// Code of the policy by which pages have a copy on a disk node, as the pager gives it; `None`
    /// if the agent may choose.
    pub backup: Option<u8>,
    /// Whether the programs continue if the socket closes without [`crate::Frame::CloseRun`],
    /// because the process that opened the run was killed.
    pub outlives_owner: bool,
    /// Whether the run ends when one of its processes is not paged.
    pub is_strict: bool,
    /// Milliseconds for which the run waits for room in a full pool before it is ended; `None` if
    /// the agent may choose.
    pub wait_for_room_ms: Option<u64>,
    /// Name of the program, for reports.
    pub name: String,
}

/// Value of [`OpenRun::limit_max_bytes`]: as much as the host can lend.
pub const LIMIT_MAX_AUTO: u64 = u64::MAX;
/// The first version with [`OpenRun::wait_for_room_ms`].
const VERSION_WITH_WAIT: u16 = 22;
/// The first version with [`OpenRun::limit_max_bytes`].
pub(crate) const VERSION_WITH_MAX: u16 = 23;
/// The first version with [`OpenRun::backup`].
const VERSION_WITH_BACKUP: u16 = 24;
/// Value of [`OpenRun::limit_max_bytes`] in a form that has one although the agent may choose.
const ANY_MAX: u64 = 0;
/// Value of the time in a form that has one although the agent may choose.
const ANY_WAIT: u64 = u64::MAX;

impl OpenRun {
    pub(crate) fn version(&self) -> u16 {
        match (self.backup, self.limit_max_bytes, self.wait_for_room_ms) {
            (Some(_), ..) => VERSION_WITH_BACKUP,
            (None, Some(_), _) => VERSION_WITH_MAX,
            (None, None, Some(_)) => VERSION_WITH_WAIT,
            (None, None, None) => VERSION_OLDEST,
        }
    }

    pub(crate) fn parse(version: u16, reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let limit_bytes = reader.u64()?;
        let replicas = reader.u32()?;
        let outlives_owner = flag(reader, "outlives_owner")?;
        let is_strict = flag(reader, "is_strict")?;
        let mut wait_for_room_ms = if version >= VERSION_WITH_WAIT { Some(reader.u64()?) } else { None };
        let mut limit_max_bytes = None;
        if version >= VERSION_WITH_MAX {
            wait_for_room_ms = wait_for_room_ms.filter(|wait_ms| *wait_ms != ANY_WAIT);
            limit_max_bytes = Some(reader.u64()?);
        }
        let mut backup = None;
        if version >= VERSION_WITH_BACKUP {
            limit_max_bytes = limit_max_bytes.filter(|max| *max != ANY_MAX);
            let code = reader.u32()?;
            backup = Some(u8::try_from(code).map_err(|_| FrameError::BadField("backup"))?);
        }
        let name = reader.text()?;
        Ok(Self {
            limit_bytes,
            limit_max_bytes,
            replicas,
            backup,
            outlives_owner,
            is_strict,
            wait_for_room_ms,
            name,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.limit_bytes.to_le_bytes());
        out.extend_from_slice(&self.replicas.to_le_bytes());
        out.extend_from_slice(&u32::from(self.outlives_owner).to_le_bytes());
        out.extend_from_slice(&u32::from(self.is_strict).to_le_bytes());
        let max_bytes = self.limit_max_bytes.or(self.backup.map(|_| ANY_MAX));
        let wait_ms = self.wait_for_room_ms.or(max_bytes.map(|_| ANY_WAIT));
        for field in [wait_ms, max_bytes].into_iter().flatten() {
            out.extend_from_slice(&field.to_le_bytes());
        }
        if let Some(code) = self.backup {
            out.extend_from_slice(&u32::from(code).to_le_bytes());
        }
        write_text(&self.name, out);
    }
}

/// A field that is 0 or 1.
fn flag(reader: &mut Reader<'_>, name: &'static str) -> Result<bool, FrameError> {
    match reader.u32()? {
        0 => Ok(false),
        1 => Ok(true),
        _ if Mutation::AcceptAnyFlag.is_active() => Ok(true),
        _ => Err(FrameError::BadField(name)),
    }
}
