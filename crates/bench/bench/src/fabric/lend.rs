//! The end of a check that lends memory and answers requests.

use std::cell::Cell;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer::say::say_line;
use aquifer::settings::Network;
use aquifer_bench::BenchError;
use aquifer_bench::support::interrupt;
use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{Access, EndpointNumber, Key, Memory, Region, Scope, Target, TargetError, WindowSpec};
use aquifer_fabric_verbs::{self as verbs, RemapMethod, VerbsTarget};

use super::CheckEnd;
use super::messages::{Moved, Opened, Request};

/// Bytes of the lent memory.
pub const REGION_BYTES: usize = 16 << 20;
/// Bytes of the memory that is remapped.
const MOVABLE_BYTES: usize = 4 << 20;
/// Offset of the window in the lent memory, with memory on both sides that the window does not
/// open.
const WINDOW_OFFSET: u64 = 8 << 20;
const WINDOW_BYTES: u64 = 64 << 10;
/// Most windows. A check that is interrupted leaves its window open.
const WINDOWS_MAX: usize = 64;
/// Time after a message for which the loop polls without sleeping.
const BUSY_TIME: Duration = Duration::from_millis(20);
/// Pause between two polls when idle.
const IDLE_PAUSE: Duration = Duration::from_millis(1);

/// Lends memory and answers requests until a signal arrives.
///
/// # Errors
/// If it cannot listen, or memory cannot be registered.
pub fn lend(end: &CheckEnd) -> Result<(), Box<dyn Error>> {
    let (address, key) = (end.address, &end.key);
    let windows_max = WINDOWS_MAX;
    let memory = Memory::create("aquifer-check", REGION_BYTES)
        .map_err(BenchError::io("create", Path::new("a memfd")))?;
    let memory = Arc::new(memory);
    // Registered first: the other end measures the first region.
    let register = |target: &dyn Target| target.register(Arc::clone(&memory), Access::ALL, Scope::Anyone);
    let (lender, address, region) = match end.network {
        Network::Tcp => {
            let options = tcp::TcpOptions { windows_max, ..tcp::TcpOptions::default() };
            let target = TcpTarget::listen(address, key, options)?;
            let (address, region) = (target.address(), register(&target)?);
            (Lender::Tcp(target), address, region)
        }
        Network::Verbs => {
            let options = verbs::VerbsOptions { windows_max, ..verbs::VerbsOptions::default() };
            let target = VerbsTarget::listen(address, key, options)?;
            let (address, region) = (target.address(), register(&target)?);
            (Lender::Verbs(Movable::new(target)?), address, region)
        }
    };
    let target = lender.target();
    let network = end.network.name();
    say_line!("Lending to: aquifer fabric check --fabric {network} {address}");
    let mut message = Vec::new();
    let mut last_message = Instant::now();
    while !interrupt::is_requested() {
        message.clear();
        if let Some(from) = target.receive(&mut message) {
            answer(&lender, &region, from.endpoint, &message);
            last_message = Instant::now();
        } else if last_message.elapsed() < BUSY_TIME {
            std::thread::yield_now();
        } else {
            target.wait(IDLE_PAUSE);
        }
    }
    Ok(())
}

/// The target of the check.
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

    /// Remaps the movable memory, if the target is an RDMA device.
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

/// A target with a region that can be remapped. One half of its memory is filled with 1 and the
/// other with 2; the start of the region is mapped to either half.
struct Movable {
    target: VerbsTarget,
    region: Region,
    has_second: Cell<bool>,
}

impl Movable {
    fn new(target: VerbsTarget) -> Result<Self, Box<dyn Error>> {
        let half = MOVABLE_BYTES / 2;
        let memory = Memory::create("aquifer-check-movable", MOVABLE_BYTES)
            .map_err(BenchError::io("create", Path::new("a memfd")))?;
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
        let how = RemapMethod::ALL.iter().position(|method| *method == how).unwrap_or_default();
        Ok(Moved {
            key,
            addr: base,
            byte: 1 + u8::from(is_second),
            how: u8::try_from(how).unwrap_or(u8::MAX),
        })
    }
}

/// Handles a request and sends the answer. Invalid requests are ignored.
fn answer(lender: &Lender, region: &Region, from: EndpointNumber, message: &[u8]) {
    let target = lender.target();
    let reply = match Request::parse(message) {
        Some(Request::Echo) => Opened { key: Key(0), addr: 0, len: 0 },
        Some(Request::Open) => {
            let addr = region.base + WINDOW_OFFSET;
            let range = addr..addr + WINDOW_BYTES;
            let window = WindowSpec { range, access: Access::READ, scope: Scope::Anyone };
            Opened { key: target.bind(&window).unwrap_or(Key(0)), addr, len: WINDOW_BYTES }
        }
        // The key of the region itself must not be revoked.
        Some(Request::Close(key)) if key != region.key => match target.invalidate(key) {
            Ok(()) => Opened { key, addr: 0, len: 0 },
            Err(_) => Opened { key: Key(0), addr: 0, len: 0 },
        },
        Some(Request::Move) => {
            target.reply(from, &lender.remap().bytes());
            return;
        }
        _ => return,
    };
    target.reply(from, &reply.bytes());
}
