//! The serving process: a node with a pool, the one-sided array and an RPC server, over shared
//! memory and over TCP.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_fabric::shm::{self, ShmTarget};
use aquifer_fabric::tcp::{self, TcpTarget};
use aquifer_fabric::{Access, Memory, Scope, Target};
use aquifer_pool::size::{SECTION_BYTES, SECTION_CHUNKS};
use aquifer_pool::{NodeId, NodeMemory};

use super::rpc::RpcServer;
use super::{KEY, NODE_SECTIONS};
use crate::bench::BenchError;
use crate::bench::support::serving;

/// Number of the node.
pub const NODE: NodeId = NodeId(1);
/// Pause between two polls within `BUSY_TIME` of a request.
const BUSY_PAUSE: Duration = Duration::from_micros(50);
const BUSY_TIME: Duration = Duration::from_millis(20);
/// Pause between two polls later, when other ways are measured.
const IDLE_PAUSE: Duration = Duration::from_millis(2);

/// Serves at `path`, and over TCP, until standard input ends.
///
/// # Errors
/// If it cannot listen, or there is too little memory.
pub fn serve_at(path: &Path) -> Result<(), BenchError> {
    let shm = ShmTarget::listen(path, shm::ShmOptions::default()).map_err(|error| failed(&error))?;
    let anywhere = ([127, 0, 0, 1], 0).into();
    let tcp =
        TcpTarget::listen(anywhere, &KEY, tcp::TcpOptions { encrypt: false, ..tcp::TcpOptions::default() })
            .map_err(|error| failed(&error))?;
    let address = tcp.address();
    let targets: [Arc<dyn Target>; 2] = [Arc::new(shm), Arc::new(tcp)];
    let mut servers = Vec::new();
    for target in targets {
        let rpc_server = lend(&*target).map_err(|reason| BenchError::Fabric { reason })?;
        servers.push(std::thread::spawn(move || attend(&*target, rpc_server)));
    }
    serving::ready(path, &address.to_string())?;
    for rpc_server in servers {
        rpc_server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    Ok(())
}

fn failed(error: &dyn std::fmt::Display) -> BenchError {
    BenchError::Fabric { reason: error.to_string() }
}

/// Registers the memory: the pool is the first region, then the array, then the memory of RPCs.
pub fn lend(target: &dyn Target) -> Result<RpcServer, String> {
    let show = |error: &dyn std::fmt::Display| error.to_string();
    NodeMemory::create(target, NODE, u64::from(NODE_SECTIONS) * SECTION_BYTES)
        .map_err(|error| show(&error))?;
    let create = |bytes: u64| {
        let bytes = usize::try_from(bytes).map_err(|error| show(&error))?;
        Memory::create("aquifer-bench", bytes).map(Arc::new).map_err(|error| show(&error))
    };
    let entries = create(u64::from(NODE_SECTIONS * SECTION_CHUNKS) * 8)?;
    target.register(entries, Access::ALL, Scope::Anyone).map_err(|error| show(&error))?;
    let handed_out = create(u64::from(NODE_SECTIONS) * SECTION_BYTES)?;
    let region =
        target.register(handed_out, Access::READ_WRITE, Scope::Anyone).map_err(|error| show(&error))?;
    Ok(RpcServer::new(NODE_SECTIONS, region.base, region.key))
}

/// Serves RPCs until the process ends.
pub fn attend(target: &dyn Target, mut rpc_server: RpcServer) {
    let mut message = Vec::new();
    // Time for which the thread polls before it sleeps, as the fabric's threads do.
    let spin_time = tcp::TcpOptions::default().spin_time;
    let mut last = Instant::now();
    let mut looks_until = last + spin_time;
    loop {
        message.clear();
        if let Some(who) = target.receive(&mut message) {
            let answer = rpc_server.answer(target, who, &message);
            target.send(who.host, &answer);
            last = Instant::now();
            looks_until = last + spin_time;
            continue;
        }
        let now = Instant::now();
        if now < looks_until {
            std::thread::yield_now();
        } else {
            std::thread::sleep(if now - last < BUSY_TIME { BUSY_PAUSE } else { IDLE_PAUSE });
            looks_until = Instant::now();
        }
    }
}
