//! Messages over Unix sockets. Each is one packet: magic, version, kind, then a body that the kind defines.

use crate::hello::{self, Hello};

/// Version of everything in this crate. Both sides must have the same.
pub const VERSION: u16 = 9;
/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"AQFR";
/// No frame is longer.
pub const FRAME_BYTES_MAX: usize = 64 << 10;
const HEADER_BYTES: usize = 8;

/// Names a run; who knows it may add programs to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub [u8; 16]);

impl std::fmt::Debug for Token {
    /// Tokens are secrets: logs get only their beginning.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Token({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

impl Token {
    /// As 32 hexadecimal digits.
    #[must_use]
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// From 32 hexadecimal digits.
    #[must_use]
    pub fn from_hex(text: &[u8]) -> Option<Self> {
        if text.len() != 32 {
            return None;
        }
        let mut token = [0; 16];
        for (byte, digits) in token.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |at: usize| match digits[at] {
                letter @ b'0'..=b'9' => Some(letter - b'0'),
                letter @ b'a'..=b'f' => Some(letter - b'a' + 10),
                _ => None,
            };
            *byte = digit(0)? << 4 | digit(1)?;
        }
        Some(Self(token))
    }
}

/// `aquifer run` asks for a run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenRun {
    /// Resident pages and mempool share together, in bytes.
    pub limit_bytes: u64,
    /// Memory nodes that each page is to be on, 1 to 3.
    pub replicas: u32,
    /// The program's name, for people.
    pub name: String,
}

/// A new limit for a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetLimit {
    /// A process of the run, or the `aquifer run` that started it.
    pub pid: u32,
    /// As [`OpenRun::limit_bytes`].
    pub limit_bytes: u64,
}

/// What the keeper holds something for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum KeptKind {
    /// The host: its mempool, its place in the cluster, the socket that programs connect to.
    Host,
    /// A run.
    Run,
    /// A program.
    Program,
    /// A userfaultfd of a forked child that the agent had not yet given a name when it died.
    Orphan,
    /// A session: a program that has extents.
    Session,
    /// A memory node: what it lends.
    Node,
}

/// What comes back from a keeper together, and is one daemon's at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Share {
    /// That of the host's agent.
    Agent,
    /// That of the memory node with this number.
    Node(u16),
}

impl Share {
    /// What something with this kind and number belongs to; `None` if there is no such node.
    #[must_use]
    pub fn of(kind: KeptKind, id: u64) -> Option<Self> {
        match kind {
            KeptKind::Node => u16::try_from(id).ok().map(Self::Node),
            _ => Some(Self::Agent),
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::Agent => 0,
            Self::Node(id) => 1 + id as u32,
        }
    }

    fn numbered(number: u32) -> Result<Self, FrameError> {
        match number.checked_sub(1).map(u16::try_from) {
            None => Ok(Self::Agent),
            Some(Ok(id)) => Ok(Self::Node(id)),
            Some(Err(_)) => Err(FrameError::BadField("share")),
        }
    }
}

/// Something that the keeper holds, with descriptors, so that it outlives the agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Put {
    /// What it is for.
    pub kind: KeptKind,
    /// The agent's number for it. For an orphan: the process id of the agent that it is of, shifted left by 32, and the descriptor's
    /// number there.
    pub id: u64,
    /// A program's process id; 0 for others, and while unknown.
    pub pid: u32,
    /// What the agent must know to go on with it. Only agents read it.
    pub record: String,
}

/// Every message there is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Frame {
    /// Program to agent; comes with a userfaultfd unless [`Hello::is_child`].
    Hello(Hello),
    /// Agent to program: you are paged. Comes with the control memory, and for a child with its userfaultfd.
    Welcome,
    /// Agent to anyone: no, because.
    Refused(String),
    /// `aquifer run` to agent.
    OpenRun(OpenRun),
    /// Agent to `aquifer run`: the run's token.
    RunOpened(Token),
    /// `aquifer run` to agent: the program has ended, give me its statistics.
    CloseRun,
    /// Agent to `aquifer run`: statistics, as JSON.
    Statistics(String),
    /// Agent to `aquifer run`: the program was ended, because.
    Ended(String),
    /// Anyone to agent: how are you?
    Status,
    /// Agent: so, as JSON.
    StatusIs(String),
    /// Agent to keeper: hold this, with the descriptors that come with it, in place of what you held under this name. Also keeper to
    /// agent: I hold this, after [`Frame::Take`].
    Put(Put),
    /// Agent to keeper: hold it no longer.
    Drop(KeptKind, u64),
    /// Agent, or node, to keeper: all of this that you hold is mine now; tell me what it is.
    Take(Share),
    /// Keeper to agent: that was all. Also the answer to itself: all that you sent is held.
    Taken,
    /// Anyone to agent: change the limit of the run that a process belongs to. Answered with the run's [`Frame::Statistics`].
    SetLimit(SetLimit),
    /// Program of a run to agent: I may not use userfaultfd, but you may.
    WantDevice(Token),
    /// Agent to program: comes with `/dev/userfaultfd`, open.
    Device,
    /// Agent to `aquifer run`: something that the user should know.
    News(String),
    /// A server of blocks to agent: what do I need to reach memory nodes?
    Borrow,
    /// Agent to a server of blocks: this, as JSON. The connection stays, for [`Frame::Ended`].
    Lent(String),
    /// A server of swap to `aquifer run`: it is there, and undone by the record of this name. Comes with the descriptor that lets
    /// programs into its cgroup.
    SwapOpened(String),
    /// A program that wants extents to agent.
    OpenSession,
    /// Agent to that program: comes with the memory of the session's ring. From now on a packet of one byte on this socket, either way, wakes who sleeps.
    SessionOpened,
    /// `aquifer up` to keeper: log how this daemon ends. Comes with its pidfd.
    Watch {
        /// Its process.
        pid: u32,
        /// Its name in the local cluster.
        name: String,
    },
}

/// Why bytes are not a frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum FrameError {
    /// Too short for what it says it is.
    Cut,
    /// Longer than its kind.
    TooLong,
    /// It does not begin as frames do.
    NotAFrame,
    /// Another version: the sender's.
    Version(u16),
    /// No such kind.
    UnknownKind(u16),
    /// A field has a value that it cannot have.
    BadField(&'static str),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cut => write!(formatter, "the message is cut short"),
            Self::TooLong => write!(formatter, "the message is too long"),
            Self::NotAFrame => write!(formatter, "this is not an Aquifer message"),
            Self::Version(theirs) => write!(
                formatter,
                "it speaks version {theirs} of the protocol and this is version {VERSION}: use parts of one build"
            ),
            Self::UnknownKind(kind) => write!(formatter, "unknown kind of message {kind}"),
            Self::BadField(name) => write!(formatter, "the field {name} has an impossible value"),
        }
    }
}

impl std::error::Error for FrameError {}

/// What is left of a packet.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], FrameError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(FrameError::Cut)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        Ok(self.take(N)?.try_into().expect("N bytes were taken"))
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

    fn text(&mut self) -> Result<String, FrameError> {
        let length = self.u32()? as usize;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| FrameError::BadField("text"))
    }
}

impl Frame {
    /// Parse one packet.
    ///
    /// # Errors
    /// If it is anything else than exactly one frame of this version.
    pub fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        if bytes.len() > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong);
        }
        let mut reader = Reader(bytes);
        if reader.array::<4>()? != MAGIC {
            return Err(FrameError::NotAFrame);
        }
        let version = reader.u16()?;
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let kind = reader.u16()?;
        let frame = Self::parse_body(kind, &mut reader)?;
        if reader.0.is_empty() { Ok(frame) } else { Err(FrameError::TooLong) }
    }

    fn parse_body(kind: u16, reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok(match kind {
            1 => Self::Hello(hello::parse(reader)?),
            2 => Self::Welcome,
            3 => Self::Refused(reader.text()?),
            4 => Self::OpenRun(OpenRun {
                limit_bytes: reader.u64()?,
                replicas: reader.u32()?,
                name: reader.text()?,
            }),
            5 => Self::RunOpened(Token(reader.array()?)),
            6 => Self::CloseRun,
            7 => Self::Statistics(reader.text()?),
            8 => Self::Ended(reader.text()?),
            9 => Self::Status,
            10 => Self::StatusIs(reader.text()?),
            11 => Self::Put(Put {
                kind: kept_kind(reader.u32()?)?,
                id: reader.u64()?,
                pid: reader.u32()?,
                record: reader.text()?,
            }),
            12 => Self::Drop(kept_kind(reader.u32()?)?, reader.u64()?),
            13 => Self::News(reader.text()?),
            14 => Self::Take(Share::numbered(reader.u32()?)?),
            15 => Self::Taken,
            16 => Self::SetLimit(SetLimit { pid: reader.u32()?, limit_bytes: reader.u64()? }),
            17 => Self::WantDevice(Token(reader.array()?)),
            18 => Self::Device,
            20 => Self::Borrow,
            21 => Self::Lent(reader.text()?),
            22 => Self::SwapOpened(reader.text()?),
            23 => Self::OpenSession,
            24 => Self::SessionOpened,
            25 => Self::Watch { pid: reader.u32()?, name: reader.text()? },
            kind => return Err(FrameError::UnknownKind(kind)),
        })
    }

    /// Append the frame's bytes to `out`. Texts that do not fit are cut.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.kind().to_le_bytes());
        match self {
            Self::Hello(hello) => hello::parts(hello, |bytes| out.extend_from_slice(bytes)),
            Self::Welcome
            | Self::CloseRun
            | Self::Status
            | Self::Borrow
            | Self::Taken
            | Self::Device
            | Self::OpenSession
            | Self::SessionOpened => {}
            Self::Refused(text)
            | Self::Statistics(text)
            | Self::Ended(text)
            | Self::StatusIs(text)
            | Self::News(text)
            | Self::Lent(text)
            | Self::SwapOpened(text) => write_text(text, out),
            Self::OpenRun(open) => {
                out.extend_from_slice(&open.limit_bytes.to_le_bytes());
                out.extend_from_slice(&open.replicas.to_le_bytes());
                write_text(&open.name, out);
            }
            Self::RunOpened(token) | Self::WantDevice(token) => out.extend_from_slice(&token.0),
            Self::Put(put) => {
                out.extend_from_slice(&kept_number(put.kind).to_le_bytes());
                out.extend_from_slice(&put.id.to_le_bytes());
                out.extend_from_slice(&put.pid.to_le_bytes());
                write_text(&put.record, out);
            }
            Self::SetLimit(set) => {
                out.extend_from_slice(&set.pid.to_le_bytes());
                out.extend_from_slice(&set.limit_bytes.to_le_bytes());
            }
            Self::Watch { pid, name } => {
                out.extend_from_slice(&pid.to_le_bytes());
                write_text(name, out);
            }
            Self::Take(share) => out.extend_from_slice(&share.number().to_le_bytes()),
            Self::Drop(kind, id) => {
                out.extend_from_slice(&kept_number(*kind).to_le_bytes());
                out.extend_from_slice(&id.to_le_bytes());
            }
        }
    }

    /// Write a frame into a buffer on the stack; returns its length. For a forked child, which may not allocate.
    ///
    /// # Panics
    /// If the frame is neither [`Frame::Hello`] nor [`Frame::WantDevice`], or the buffer is too small for it.
    pub fn write_fixed(&self, out: &mut [u8]) -> usize {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&self.kind().to_le_bytes());
        match self {
            Self::Hello(hello) => hello::parts(hello, put),
            Self::WantDevice(token) => put(&token.0),
            _ => panic!("only what a program says is written without allocating"),
        }
        at
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
            Self::Status => 9,
            Self::StatusIs(_) => 10,
            Self::Put(_) => 11,
            Self::Drop(..) => 12,
            Self::News(_) => 13,
            Self::Take(_) => 14,
            Self::Taken => 15,
            Self::SetLimit(_) => 16,
            Self::WantDevice(_) => 17,
            Self::Device => 18,
            Self::Borrow => 20,
            Self::Lent(_) => 21,
            Self::SwapOpened(_) => 22,
            Self::OpenSession => 23,
            Self::SessionOpened => 24,
            Self::Watch { .. } => 25,
        }
    }
}

fn kept_kind(number: u32) -> Result<KeptKind, FrameError> {
    Ok(match number {
        1 => KeptKind::Host,
        2 => KeptKind::Run,
        3 => KeptKind::Program,
        4 => KeptKind::Orphan,
        5 => KeptKind::Session,
        6 => KeptKind::Node,
        _ => return Err(FrameError::BadField("kind")),
    })
}

fn kept_number(kind: KeptKind) -> u32 {
    match kind {
        KeptKind::Host => 1,
        KeptKind::Run => 2,
        KeptKind::Program => 3,
        KeptKind::Orphan => 4,
        KeptKind::Session => 5,
        KeptKind::Node => 6,
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    let mut end = text.len().min(FRAME_BYTES_MAX - HEADER_BYTES - 32);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let length = u32::try_from(end).expect("frames are small");
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

#[cfg(test)]
mod tests;
