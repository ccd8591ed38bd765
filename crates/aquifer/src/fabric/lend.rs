//! The end of a check that lends memory and answers.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::verbs::{self, VerbsTarget};
use aquifer_fabric::{Access, Host, Key, Memory, Region, Scope, Target, WindowSpec};

use super::End;
use super::talk::{Opened, Request};
use crate::bench::BenchError;
use crate::bench::support::interrupt;
use crate::say::say_line;
use crate::settings::Network;

/// Memory that is lent.
pub const REGION_BYTES: usize = 16 << 20;
/// A window's place in it: with memory on both sides that it does not open.
const WINDOW_OFFSET: u64 = 8 << 20;
const WINDOW_BYTES: u64 = 64 << 10;
/// Windows of those who went away without closing theirs.
const WINDOWS_MAX: usize = 64;
/// After a message it looks for the next one without sleeping for so long.
const AWAKE: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_millis(1);

/// Lend until a signal comes.
pub fn lend(end: &End) -> Result<(), Box<dyn Error>> {
    let (address, key) = (end.address, &end.key);
    let windows_max = WINDOWS_MAX;
    let (target, address): (Box<dyn Target>, _) = match end.network {
        Network::Tcp => {
            let options = tcp::Options { windows_max, ..tcp::Options::default() };
            let target = TcpTarget::listen(address, key, options)?;
            let address = target.address();
            (Box::new(target), address)
        }
        Network::Verbs => {
            let options = verbs::Options { windows_max, ..verbs::Options::default() };
            let target = VerbsTarget::listen(address, key, options)?;
            let address = target.address();
            (Box::new(target), address)
        }
    };
    let memory = Memory::create("aquifer-check", REGION_BYTES)
        .map_err(BenchError::io("make", Path::new("a memfd")))?;
    let region = target.register(Arc::new(memory), Access::ALL, Scope::Anyone)?;
    let network = end.network.name();
    say_line!("Lending to: aquifer fabric check --fabric {network} {address}");
    let mut message = Vec::new();
    let mut heard = Instant::now();
    while !interrupt::asked() {
        message.clear();
        if let Some(from) = target.receive(&mut message) {
            answer(&*target, &region, from.host, &message);
            heard = Instant::now();
        } else if heard.elapsed() < AWAKE {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
    }
    Ok(())
}

/// Do what was asked. Who asks for nonsense hears nothing.
fn answer(target: &dyn Target, region: &Region, from: Host, message: &[u8]) {
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
        _ => return,
    };
    target.send(from, &reply.bytes());
}
