//! Frames: the messages on Unix sockets between the processes of one machine.
//!
//! A frame is one packet: magic, version, kind, and a body whose form depends on the kind.
//! The bytes are in `docs/formats/ipc.md`.

use crate::hello::{self, ProgramHello};
use crate::mutation::Mutation;
use crate::open_run::{OpenRun, VERSION_WITH_MAX};

/// The newest version of a frame.
///
/// A frame has the version that introduced its form, so that a peer of an earlier version
/// understands all frames whose form it knows. A form stays accepted for at least one version after
/// the one that replaces it.
pub const VERSION: u16 = 24;
/// The version of frames whose form has never changed.
pub const VERSION_OLDEST: u16 = 21;
/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"AQFR";
/// Maximum length of a frame, header included.
pub const FRAME_BYTES_MAX: usize = 64 << 10;
const HEADER_BYTES: usize = 8;
/// Bytes that a text leaves for the other fields of its frame.
const FIXED_FIELDS_BYTES_MAX: usize = 32;

/// Secret that identifies a run. A process that presents it joins the run.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunToken(pub [u8; 16]);

impl std::fmt::Debug for RunToken {
    /// Shows the first two bytes only, because logs must not contain the secret.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Token({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

impl RunToken {
    /// The token as 32 hexadecimal digits.
    #[must_use]
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Parses 32 lower-case hexadecimal digits; `None` for any other text.
    #[must_use]
    pub fn from_hex(text: &[u8]) -> Option<Self> {
        let is_long = text.len() > 32 && Mutation::AcceptLongToken.is_active();
        if text.len() != 32 && !is_long {
            return None;
        }
        let mut token = [0; 16];
        for (byte, digits) in token.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |at: usize| match digits[at] {
                digit @ b'0'..=b'9' => Some(digit - b'0'),
                digit @ b'a'..=b'f' => Some(digit - b'a' + 10),
                _ => None,
            };
            *byte = digit(0)? << 4 | digit(1)?;
        }
        Some(Self(token))
    }
}

/// Body of [`Frame::SetLimit`]: a new limit for a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetLimit {
    /// A process of the run, or the `aquifer run` that started it.
    pub pid: u32,
    /// The new value of [`OpenRun::limit_bytes`].
    pub limit_bytes: u64,
    /// The new value of [`OpenRun::limit_max_bytes`]; `None` if it stays as it is.
    pub limit_max_bytes: Option<u64>,
}

/// Body of [`Frame::HoldSpans`]: the memory that the heaps on a node may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HoldSpans {
    /// Spans of 128 KiB, in all.
    pub spans: u32,
    /// Milliseconds for which the heaps, and so the spans, outlive the service's process.
    pub kept_ms: u64,
}

/// Kind of an item that the keeper holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum HeldKind {
    /// The agent's host: mempool, identity in the directory, and listening sockets.
    Host,
    /// A run: its slab records and the socket of its owner.
    Run,
    /// A program of a run: userfaultfd, page table and journal.
    Program,
    /// The userfaultfd of a forked child that the agent had not recorded when it died.
    Orphan,
    /// A session: ring, book, socket and pidfd of a program that uses extents.
    Session,
    /// A memory node: the memory that it lends.
    Node,
    /// A heap of objects: its memory. Its number is the node's, shifted left by 16, plus its own.
    Heap,
    /// A segment: its memory.
    Segment,
    /// A partition of a cache: its memory. Its number is that of the partition, and in the upper 48
    /// bits a part of the cache's identity.
    Partition,
}

/// A set of held items that belongs to one daemon. At most one process owns a share at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum KeeperShare {
    /// The share of the host's agent.
    Agent,
    /// The share of the memory node with this number.
    Node(u16),
    /// The share of the heaps on the node with this number.
    Heaps(u16),
    /// The share of the servers of the cache with these bits of its identity. A server has it for a
    /// moment when it starts and when it ends.
    Cache(u16),
}

/// The number of the share of the heaps on node 0.
const HEAPS_FIRST: u32 = 1 + (1 << 16);
/// The number of the share of the cache with identity 0.
const CACHES_FIRST: u32 = HEAPS_FIRST + (1 << 16);

impl KeeperShare {
    /// The share that an item belongs to; `None` if `id` has no node number.
    #[must_use]
    pub fn of(kind: HeldKind, id: u64) -> Option<Self> {
        match kind {
            HeldKind::Node => u16::try_from(id).ok().map(Self::Node),
            HeldKind::Heap => u16::try_from(id >> 16).ok().map(Self::Heaps),
            HeldKind::Partition => u16::try_from(id >> 16 & u64::from(u16::MAX)).ok().map(Self::Cache),
            _ => Some(Self::Agent),
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::Agent => 0,
            Self::Node(id) => 1 + id as u32,
            Self::Heaps(id) => HEAPS_FIRST + id as u32,
            Self::Cache(id) => CACHES_FIRST + id as u32,
        }
    }

    fn numbered(number: u32) -> Result<Self, FrameError> {
        let node_of = |first: u32| u16::try_from(number - first).map_err(|_| FrameError::BadField("share"));
        match number {
            0 => Ok(Self::Agent),
            1..HEAPS_FIRST => node_of(1).map(Self::Node),
            HEAPS_FIRST..CACHES_FIRST => node_of(HEAPS_FIRST).map(Self::Heaps),
            _ => node_of(CACHES_FIRST).map(Self::Cache),
        }
    }
}

/// An item that the keeper holds, without its descriptors, so that it outlives its daemon.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeldItem {
    /// Kind of the item.
    pub kind: HeldKind,
    /// Number of the item, unique in its kind.
    ///
    /// For an orphan: the agent's process id shifted left by 32, plus the descriptor's number in
    /// that process.
    pub id: u64,
    /// Process id of a program; 0 for other kinds, and while it is unknown.
    pub pid: u32,
    /// User of the item. The keeper kills a program with this user's rights only.
    pub uid: u32,
    /// JSON that the next daemon needs to resume. The keeper does not read it.
    pub record: String,
}

/// A message, with its body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// Program to agent: requests to be paged. Carries a userfaultfd unless
    /// [`ProgramHello::is_child`].
    Hello(ProgramHello),
    /// Agent to program: the program is paged. Carries the control memory, and for a forked child
    /// its userfaultfd.
    Welcome,
    /// Agent or keeper to any process: the request is refused for this reason.
    Refused(String),
    /// `aquifer run` to agent: requests a run.
    OpenRun(OpenRun),
    /// Agent to `aquifer run`: the run exists and has this token.
    RunOpened(RunToken),
    /// `aquifer run` to agent: the program has ended. Answered with [`Frame::Statistics`].
    CloseRun,
    /// Agent to `aquifer run`: statistics of the run, as JSON. Swap server to agent: a report with
    /// them.
    Statistics(String),
    /// Agent to `aquifer run` or to a session: it was ended for this reason.
    Ended(String),
    /// Any process to agent: requests the state of the agent.
    StatusRequest,
    /// Agent: its state, as JSON.
    StatusReport(String),
    /// Daemon to keeper: hold this item with the descriptors of this frame, and replace an item of
    /// the same kind and number. Keeper to daemon, after [`Frame::Claim`]: an item of the share.
    Hold(HeldItem),
    /// Daemon to keeper: release the item of this kind and number.
    Release(HeldKind, u64),
    /// Daemon to keeper: make the sender the owner of this share, and send its items.
    Claim(KeeperShare),
    /// Keeper to daemon: all items of the claimed share were sent. From any process to the keeper:
    /// a barrier, which the keeper returns when it holds everything that was sent before.
    Sync,
    /// Any process to agent, and agent to swap server: changes the limit of a run. Answered with
    /// [`Frame::Statistics`].
    SetLimit(SetLimit),
    /// Program to agent: requests `/dev/userfaultfd`, which the program itself may not open.
    DeviceRequest(RunToken),
    /// Agent to program: carries `/dev/userfaultfd`, open.
    Device,
    /// Agent to `aquifer run`: a message for the user.
    Notice(String),
    /// Swap server to agent: requests access to the directory and the memory nodes.
    ClusterAccessRequest,
    /// Agent to swap server: the answer, as JSON. The connection stays open for [`Frame::Ended`],
    /// [`Frame::SetLimit`] and the server's reports.
    ClusterAccess(String),
    /// Swap server to `aquifer run`: the device is in use, and the setup record of this name undoes
    /// the setup. Carries `cgroup.procs` of the cgroup that swaps to the device.
    SwapOpened(String),
    /// Program to agent: requests a session.
    OpenSession,
    /// Agent to program: carries the memory of the session's ring. From then on a packet of one
    /// byte wakes the other end.
    SessionOpened,
    /// Program to agent: requests access to the heap of its user on this node; 0 if the agent may
    /// choose the node.
    HeapAccessRequest(u16),
    /// Agent to program: the answer, as JSON. Carries the descriptors of a heap of this machine.
    HeapAccess(String),
    /// Agent to service of heaps: open the heap of this user for a program of this machine.
    OpenHeap(u32),
    /// Service of heaps to agent: carries the heap's bytes and names. From then on the socket is
    /// for the program's requests.
    HeapOpened,
    /// Service of heaps to node: hold this much memory for heaps. Answered with
    /// [`Frame::SpansHeld`].
    HoldSpans(HoldSpans),
    /// Node to service of heaps: it holds this many spans for heaps now.
    SpansHeld(u32),
    /// Program to agent: a request about segments, as JSON. Carries a userfaultfd if the request
    /// needs one.
    SegmentCall(String),
    /// Agent to program: the answer, as JSON. Carries the descriptor of a segment, and
    /// `/dev/userfaultfd` if the program needs it.
    SegmentAnswer(String),
    /// `aquifer up` to keeper: log how this daemon ends. Carries the daemon's pidfd.
    WatchDaemon {
        /// Process id of the daemon.
        pid: u32,
        /// Name of the daemon in the local cluster.
        name: String,
    },
    /// Keeper to daemon: an item of [`Frame::Hold`] is not held.
    HoldRefused {
        /// Kind of the item.
        kind: HeldKind,
        /// Number of the item.
        id: u64,
        /// The reason for the refusal.
        reason: String,
    },
}

/// Why bytes are not a frame of these versions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrameError {
    /// Fewer bytes than the fields need.
    Truncated,
    /// More bytes than a frame, or than this kind of frame, has.
    TooLong,
    /// The first bytes are not [`MAGIC`].
    BadMagic,
    /// The sender has this version of the protocol.
    OtherVersion(u16),
    /// No frame has this kind.
    UnknownKind(u16),
    /// The field of this name has an invalid value.
    BadField(&'static str),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Truncated => write!(formatter, "the message is truncated"),
            Self::TooLong => write!(formatter, "the message is too long"),
            Self::BadMagic => write!(formatter, "this is not an Aquifer message"),
            Self::OtherVersion(theirs) => write!(
                formatter,
                "the message has version {theirs}, and here are versions {VERSION_OLDEST} to {VERSION}: use \
                 parts of one build, or of the one before"
            ),
            Self::UnknownKind(kind) => write!(formatter, "message kind {kind} is unknown"),
            Self::BadField(name) => write!(formatter, "the message field {name} has an invalid value"),
        }
    }
}

impl std::error::Error for FrameError {}

/// Reads the fields of a packet in order.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Result<&'a [u8], FrameError> {
        let (bytes, rest) = self.0.split_at_checked(count).ok_or(FrameError::Truncated)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        Ok(self.bytes(N)?.try_into().expect("the slice has N bytes"))
    }

    fn u16(&mut self) -> Result<u16, FrameError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, FrameError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, FrameError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn text(&mut self) -> Result<String, FrameError> {
        let length = self.u32()? as usize;
        let bytes = self.bytes(length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| FrameError::BadField("text"))
    }
}

impl Frame {
    /// Parses one packet.
    ///
    /// # Errors
    /// If the packet is not exactly one frame, in a form of [`VERSION_OLDEST`] to [`VERSION`].
    pub fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        if bytes.len() > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong);
        }
        let mut reader = Reader(bytes);
        if reader.array::<4>()? != MAGIC {
            return Err(FrameError::BadMagic);
        }
        let version = reader.u16()?;
        if !(VERSION_OLDEST..=VERSION).contains(&version) {
            return Err(FrameError::OtherVersion(version));
        }
        let kind = reader.u16()?;
        let frame = Self::parse_body(kind, version, &mut reader)?;
        if frame.version() != version {
            return Err(FrameError::OtherVersion(version));
        }
        if reader.0.is_empty() { Ok(frame) } else { Err(FrameError::TooLong) }
    }

    fn parse_body(kind: u16, version: u16, reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(match kind {
            1 => Self::Hello(hello::parse(reader)?),
            2 => Self::Welcome,
            3 => Self::Refused(reader.text()?),
            4 => Self::OpenRun(OpenRun::parse(version, reader)?),
            5 => Self::RunOpened(RunToken(reader.array()?)),
            6 => Self::CloseRun,
            7 => Self::Statistics(reader.text()?),
            8 => Self::Ended(reader.text()?),
            9 => Self::StatusRequest,
            10 => Self::StatusReport(reader.text()?),
            11 => Self::Hold(HeldItem {
                kind: held_kind(reader.u32()?)?,
                id: reader.u64()?,
                pid: reader.u32()?,
                uid: reader.u32()?,
                record: reader.text()?,
            }),
            12 => Self::Release(held_kind(reader.u32()?)?, reader.u64()?),
            13 => Self::Notice(reader.text()?),
            14 => Self::Claim(KeeperShare::numbered(reader.u32()?)?),
            15 => Self::Sync,
            16 => Self::SetLimit(SetLimit {
                pid: reader.u32()?,
                limit_bytes: reader.u64()?,
                limit_max_bytes: if version >= VERSION_WITH_MAX { Some(reader.u64()?) } else { None },
            }),
            17 => Self::DeviceRequest(RunToken(reader.array()?)),
            18 => Self::Device,
            20 => Self::ClusterAccessRequest,
            21 => Self::ClusterAccess(reader.text()?),
            22 => Self::SwapOpened(reader.text()?),
            23 => Self::OpenSession,
            24 => Self::SessionOpened,
            25 => Self::WatchDaemon { pid: reader.u32()?, name: reader.text()? },
            26 => Self::HoldRefused {
                kind: held_kind(reader.u32()?)?,
                id: reader.u64()?,
                reason: reader.text()?,
            },
            27 => Self::HeapAccessRequest(reader.u16()?),
            28 => Self::HeapAccess(reader.text()?),
            29 => Self::OpenHeap(reader.u32()?),
            30 => Self::HeapOpened,
            31 => Self::HoldSpans(HoldSpans { spans: reader.u32()?, kept_ms: reader.u64()? }),
            32 => Self::SpansHeld(reader.u32()?),
            33 => Self::SegmentCall(reader.text()?),
            34 => Self::SegmentAnswer(reader.text()?),
            kind => return Err(FrameError::UnknownKind(kind)),
        })
    }

    /// Appends the frame's bytes to `out`. Truncates a text that does not fit into a frame.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.version().to_le_bytes());
        out.extend_from_slice(&self.kind().to_le_bytes());
        match self {
            Self::Hello(hello) => hello::write_parts(hello, |bytes| out.extend_from_slice(bytes)),
            Self::Welcome
            | Self::CloseRun
            | Self::StatusRequest
            | Self::ClusterAccessRequest
            | Self::HeapOpened
            | Self::Sync
            | Self::Device
            | Self::OpenSession
            | Self::SessionOpened => {}
            Self::Refused(text)
            | Self::Statistics(text)
            | Self::Ended(text)
            | Self::StatusReport(text)
            | Self::Notice(text)
            | Self::ClusterAccess(text)
            | Self::HeapAccess(text)
            | Self::SegmentCall(text)
            | Self::SegmentAnswer(text)
            | Self::SwapOpened(text) => write_text(text, out),
            Self::OpenRun(open) => open.write(out),
            Self::RunOpened(token) | Self::DeviceRequest(token) => out.extend_from_slice(&token.0),
            Self::Hold(item) => {
                out.extend_from_slice(&held_kind_number(item.kind).to_le_bytes());
                out.extend_from_slice(&item.id.to_le_bytes());
                out.extend_from_slice(&item.pid.to_le_bytes());
                out.extend_from_slice(&item.uid.to_le_bytes());
                write_text(&item.record, out);
            }
            Self::SetLimit(set) => {
                out.extend_from_slice(&set.pid.to_le_bytes());
                out.extend_from_slice(&set.limit_bytes.to_le_bytes());
                if let Some(max_bytes) = set.limit_max_bytes {
                    out.extend_from_slice(&max_bytes.to_le_bytes());
                }
            }
            Self::WatchDaemon { pid, name } => {
                out.extend_from_slice(&pid.to_le_bytes());
                write_text(name, out);
            }
            Self::HoldRefused { kind, id, reason } => {
                out.extend_from_slice(&held_kind_number(*kind).to_le_bytes());
                out.extend_from_slice(&id.to_le_bytes());
                write_text(reason, out);
            }
            Self::HeapAccessRequest(node) => out.extend_from_slice(&node.to_le_bytes()),
            Self::HoldSpans(hold) => {
                out.extend_from_slice(&hold.spans.to_le_bytes());
                out.extend_from_slice(&hold.kept_ms.to_le_bytes());
            }
            Self::SpansHeld(spans) => out.extend_from_slice(&spans.to_le_bytes()),
            Self::OpenHeap(uid) => out.extend_from_slice(&uid.to_le_bytes()),
            Self::Claim(share) => out.extend_from_slice(&share.number().to_le_bytes()),
            Self::Release(kind, id) => {
                out.extend_from_slice(&held_kind_number(*kind).to_le_bytes());
                out.extend_from_slice(&id.to_le_bytes());
            }
        }
    }

    /// Writes the frame into a fixed buffer and returns its length.
    ///
    /// For a forked child, which must not allocate.
    ///
    /// # Panics
    /// If the frame is neither [`Frame::Hello`] nor [`Frame::DeviceRequest`], or if the buffer is
    /// too small for it.
    pub fn write_fixed(&self, out: &mut [u8]) -> usize {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&self.version().to_le_bytes());
        put(&self.kind().to_le_bytes());
        match self {
            Self::Hello(hello) => hello::write_parts(hello, put),
            Self::DeviceRequest(token) => put(&token.0),
            _ => panic!("only Hello and DeviceRequest are written without allocating"),
        }
        at
    }

    /// The version that introduced the form of this frame.
    fn version(&self) -> u16 {
        match self {
            Self::OpenRun(open) => open.version(),
            Self::SetLimit(SetLimit { limit_max_bytes: Some(_), .. }) => VERSION_WITH_MAX,
            _ => VERSION_OLDEST,
        }
    }

    fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => 1,
            Self::Welcome => 2,
            Self::Refused(_) => 3,
            Self::OpenRun(_) => 4,
            Self::RunOpened(_) => 5,
            Self::CloseRun => 6,
            Self::Statistics(_) => 7,
            Self::Ended(_) => 8,
            Self::StatusRequest => 9,
            Self::StatusReport(_) => 10,
            Self::Hold(_) => 11,
            Self::Release(..) => 12,
            Self::Notice(_) => 13,
            Self::Claim(_) => 14,
            Self::Sync => 15,
            Self::SetLimit(_) => 16,
            Self::DeviceRequest(_) => 17,
            Self::Device => 18,
            Self::ClusterAccessRequest => 20,
            Self::ClusterAccess(_) => 21,
            Self::SwapOpened(_) => 22,
            Self::OpenSession => 23,
            Self::SessionOpened => 24,
            Self::WatchDaemon { .. } => 25,
            Self::HoldRefused { .. } => 26,
            Self::HeapAccessRequest(_) => 27,
            Self::HeapAccess(_) => 28,
            Self::OpenHeap(_) => 29,
            Self::HeapOpened => 30,
            Self::HoldSpans(_) => 31,
            Self::SpansHeld(_) => 32,
            Self::SegmentCall(_) => 33,
            Self::SegmentAnswer(_) => 34,
        }
    }
}

fn held_kind(number: u32) -> Result<HeldKind, FrameError> {
    Ok(match number {
        1 => HeldKind::Host,
        2 => HeldKind::Run,
        3 => HeldKind::Program,
        4 => HeldKind::Orphan,
        5 => HeldKind::Session,
        6 => HeldKind::Node,
        7 => HeldKind::Heap,
        8 => HeldKind::Segment,
        9 => HeldKind::Partition,
        _ => return Err(FrameError::BadField("kind")),
    })
}

fn held_kind_number(kind: HeldKind) -> u32 {
    match kind {
        HeldKind::Host => 1,
        HeldKind::Run => 2,
        HeldKind::Program => 3,
        HeldKind::Orphan => 4,
        HeldKind::Session => 5,
        HeldKind::Node => 6,
        HeldKind::Heap => 7,
        HeldKind::Segment => 8,
        HeldKind::Partition => 9,
    }
}

pub(crate) fn write_text(text: &str, out: &mut Vec<u8>) {
    let mut end = text.len().min(FRAME_BYTES_MAX - HEADER_BYTES - FIXED_FIELDS_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let length = u32::try_from(end).expect("a frame is shorter than 4 GiB");
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

#[cfg(test)]
mod tests;
