//! The request of `aquifer run` for a run.

use crate::frame::{FrameError, Reader, VERSION_OLDEST, write_text};
use crate::mutation::Mutation;

/// Body of [`crate::Frame::OpenRun`]: the options of a new run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenRun {
    /// Limit of the run's resident pages and its part of the mempool together.
    pub limit_bytes: u64,
    /// Memory nodes that hold a copy of each page, 1 to 3.
    pub replicas: u32,
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

/// The first version with [`OpenRun::wait_for_room_ms`].
const VERSION_WITH_WAIT: u16 = 22;

impl OpenRun {
    pub(crate) fn version(&self) -> u16 {
        if self.wait_for_room_ms.is_some() { VERSION_WITH_WAIT } else { VERSION_OLDEST }
    }

    pub(crate) fn parse(version: u16, reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(Self {
            limit_bytes: reader.u64()?,
            replicas: reader.u32()?,
            outlives_owner: flag(reader, "outlives_owner")?,
            is_strict: flag(reader, "is_strict")?,
            wait_for_room_ms: if version >= VERSION_WITH_WAIT { Some(reader.u64()?) } else { None },
            name: reader.text()?,
        })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.limit_bytes.to_le_bytes());
        out.extend_from_slice(&self.replicas.to_le_bytes());
        out.extend_from_slice(&u32::from(self.outlives_owner).to_le_bytes());
        out.extend_from_slice(&u32::from(self.is_strict).to_le_bytes());
        if let Some(wait_ms) = self.wait_for_room_ms {
            out.extend_from_slice(&wait_ms.to_le_bytes());
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
