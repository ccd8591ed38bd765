//! The end of a check that lends memory and answers.

use std::cell::Cell;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{Access, Host, Key, Memory, Region, Scope, Target, TargetError, WindowSpec};
use aquifer_fabric_verbs::{self as verbs, RemapMethod, VerbsTarget};

use super::CheckEnd;
use super::talk::{Moved, Opened, Request};
use crate::bench::BenchError;
use crate::bench::support::interrupt;
use aquifer::say::say_line;
use aquifer::settings::Network;

/// Memory that is lent.
pub const REGION_BYTES: usize = 16 << 20;
/// Memory that is remapped.
const MOVABLE_BYTES: usize = 4 << 20;
/// A window's place in it: with memory on both sides that it does not open.
const WINDOW_OFFSET: u64 = 8 << 20;
const WINDOW_BYTES: u64 = 64 << 10;
/// Windows of those who went away without closing theirs.
const WINDOWS_MAX: usize = 64;
/// After a message it looks for the next one without sleeping for so long.
const AWAKE: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_millis(1);

/// Lend until a signal comes.
pub fn lend(end: &CheckEnd) -> Result<(), Box<dyn Error>> {
    let (address, key) = (end.address, &end.key);
    let windows_max = WINDOWS_MAX;
    let memory = Memory::create("aquifer-check", REGION_BYTES)
        .map_err(BenchError::io("make", Path::new("a memfd")))?;
    let memory = Arc::new(memory);
    // Before any other: the first region is what is measured.
    let register = |target: &dyn Target| target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone);
    let (lender, address, region) = match end.network {
        Network::Tcp => {
            let options = tcp::Options { windows_max, ..tcp::Options::default() };
            let target = TcpTarget::listen(address, key, options)?;
            let (address, region) = (target.address(), register(&target)?);
            (Lender::Tcp(target), address, region)
        }
        Network::Verbs => {
            let options = verbs::Options { windows_max, ..verbs::Options::default() };
            let target = VerbsTarget::listen(address, key, options)?;
            let (address, region) = (target.address(), register(&target)?);
            (Lender::Verbs(Movable::new(target)?), address, region)
        }
    };
    let target = lender.target();
    let network = end.network.name();
    say_line!("Lending to: aquifer fabric check --fabric {network} {address}");
    let mut message = Vec::new();
    let mut heard = Instant::now();
    while !interrupt::asked() {
        message.clear();
        if let Some(from) = target.receive(&mut message) {
            answer(&lender, &region, from.host, &message);
            heard = Instant::now();
        } else if heard.elapsed() < AWAKE {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
    }
    Ok(())
}

/// Whose memory it is.
enum Lender {
    Tcp(TcpTarget),
    Verbs(Movable),
}

impl Lender {
    fn target(&self) -> &dyn Target {
        match self {
            Self::Tcp(target) => target,
            Self::Verbs(movable) => &movable.target,
        }
    }

    /// Put other pages under the same addresses, where that is done by a device.
    fn remap(&self) -> Moved {
        let none = Moved { key: Key(0), addr: 0, byte: 0, how: 0 };
        match self {
            Self::Tcp(_) => none,
            Self::Verbs(movable) => movable.remap().unwrap_or_else(|error| {
                tracing::error!(%error, "memory cannot be remapped");
                none
            }),
        }
    }
}

/// A target with a region whose pages change places: one half is full of 1, the other of 2, and the
/// first addresses get one or the other.
struct Movable {
    target: VerbsTarget,
    region: Region,
    has_second: Cell<bool>,
}

impl Movable {
    fn new(target: VerbsTarget) -> Result<Self, Box<dyn Error>> {
        let half = MOVABLE_BYTES / 2;
        let memory = Memory::create("aquifer-check-movable", MOVABLE_BYTES)
            .map_err(BenchError::io("make", Path::new("a memfd")))?;
        memory.write(0, &vec![1; half]);
        memory.write(half, &vec![2; half]);
        let region = target.register_movable(Arc::new(memory), Access::READ, Scope::Anyone)?;
        Ok(Self { target, region, has_second: Cell::new(false) })
    }

    fn remap(&self) -> Result<Moved, TargetError> {
        let Region { base, key, .. } = self.region;
        let half = MOVABLE_BYTES as u64 / 2;
        let is_second = !self.has_second.get();
        let how = self.target.remap(base, if is_second { half } else { 0 }, half)?;
        self.has_second.set(is_second);
        let how = RemapMethod::ALL.iter().position(|way| *way == how).unwrap_or_default();
        Ok(Moved {
            key,
            addr: base,
            byte: 1 + u8::from(is_second),
            how: u8::try_from(how).unwrap_or(u8::MAX),
        })
    }
}

/// Do what was asked. Who asks for nonsense hears nothing.
fn answer(lender: &Lender, region: &Region, from: Host, message: &[u8]) {
    let target = lender.target();
    let reply = match Request::parse(message) {
        Some(Request::Echo) => Opened { key: Key(0), addr: 0, len: 0 },
        Some(Request::Open) => {
            let addr = region.base + WINDOW_OFFSET;
            let range = addr..addr + WINDOW_BYTES;
            let window = WindowSpec { range, access: Access::READ, scope: Scope::Anyone };
            Opened { key: target.bind(&window).unwrap_or(Key(0)), addr, len: WINDOW_BYTES }
        }
        // Nobody may close what is no window: the region has a key, too.
        Some(Request::Close(key)) if key != region.key => match target.invalidate(key) {
            Ok(()) => Opened { key, addr: 0, len: 0 },
            Err(_) => Opened { key: Key(0), addr: 0, len: 0 },
        },
        Some(Request::Move) => {
            target.send(from, &lender.remap().bytes());
            return;
        }
        _ => return,
    };
    target.send(from, &reply.bytes());
}
