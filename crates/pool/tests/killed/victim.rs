//! The host that is killed: it takes and gives back extents of all sizes, writes them, and recovers another, until its end.

use std::io::{Read, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{
    Completion, Endpoint, Host, Identity, Key, LocalKey, LocalSlice, Memory, PostError, Reach, RemoteAddr,
    Tenant, Verb, Work, forward_endpoint,
};
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};
use rustix::process::{Pid, Signal, getpid, kill_process};

pub const NODE: NodeId = NodeId(7);
pub const TENANT: Tenant = Tenant(0);
pub const VICTIM: Host = Host(2);
/// Dead already when the victim begins.
pub const EARLIER: Host = Host(3);
pub const KEY: ClusterKey = ClusterKey([3; 32]);

const VARIABLE: &str = "AQUIFER_TEST_VICTIM";
pub const DATA_BYTES: usize = 2 << 20;

/// How it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// SIGKILL.
    Kill,
    /// SIGSTOP: it may go on later.
    Stop,
    /// It writes the same section again and again, until somebody stops it.
    Write,
}

/// Just before a step, or when it has been posted and nothing heard of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    Before,
    After,
}

/// One that was started.
pub struct Victim {
    pub pid: Pid,
    /// As long as this is open it does not go on after it was stopped.
    pub leash: ChildStdin,
    /// What it was told of, one by one: see [`told`].
    pub told: ChildStdout,
}

/// Start one that ends so.
#[expect(clippy::zombie_processes, reason = "it is waited for by its number: it may only be stopped")]
pub fn start(reach: &Reach, epoch: u64, step: usize, moment: Moment, end: End) -> Victim {
    let fate = format!("{} {} {epoch} {step} {moment:?} {end:?}", reach.provider(), reach.address());
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", super::VICTIM_TEST, "--nocapture"]).env(VARIABLE, fate);
    command.stdout(Stdio::piped()).stdin(Stdio::piped());
    let mut child = command.spawn().expect("it can be started");
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process")).expect("a process");
    let (leash, told) = (child.stdin.take(), child.stdout.take());
    Victim { pid, leash: leash.expect("it is piped"), told: told.expect("it is piped") }
}

/// Before each extent that a victim was told of, in what it says.
const TOLD: &str = "told ";

/// The extent is the victim's, and it knows the key.
fn tell(extent: &Extent) {
    let mut stdout = std::io::stdout().lock();
    let (k, key) = (extent.class.k(), extent.key.0);
    writeln!(stdout, "{TOLD}{} {k} {key}", extent.addr).and_then(|()| stdout.flush()).expect("it is heard");
}

/// What a victim was told of that has ended, or stands still.
pub fn told(victim: &mut Victim) -> impl Iterator<Item = Extent> + use<> {
    rustix::io::ioctl_fionbio(&victim.told, true).expect("it is a pipe");
    let mut said = Vec::new();
    // To its end, or as far as it has got.
    let _ = victim.told.read_to_end(&mut said);
    let said = String::from_utf8(said).expect("it is text");
    let extents: Vec<Extent> = said.lines().filter_map(extent_told).collect();
    extents.into_iter()
}

/// What a line of what a victim says tells of.
fn extent_told(line: &str) -> Option<Extent> {
    let mut words = line.strip_prefix(TOLD)?.split(' ');
    let addr = words.next()?.parse().ok()?;
    let class = SizeClass::new(words.next()?.parse().ok()?)?;
    let key = Key(words.next()?.parse().ok()?);
    Some(Extent { node: NODE, addr, class, key })
}

/// Do what was asked for, if this process was started for it.
pub fn be_one() {
    let Ok(fate) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = fate.split(' ').collect();
    let [provider, address, epoch, step, moment, end] = words[..] else { panic!("{fate}") };
    let reach = Reach::parse(provider, address).expect("a way to the node");
    let who = Identity { host: VICTIM, epoch: epoch.parse().expect("a number"), tenant: TENANT };
    let inner = reach.connect(who, Some(&KEY), &ConnectOptions::default()).expect("the node listens");
    let doomed = Doomed {
        inner,
        left: step.parse().expect("a number"),
        moment: if moment == "Before" { Moment::Before } else { Moment::After },
        signal: if end == "Kill" { Signal::KILL } else { Signal::STOP },
    };
    let mut live: fn(&mut PoolClient) -> Result<(), PoolError> = live;
    if end == "Write" {
        live = write_for_ever;
    }
    let mut client = PoolClient::new(VICTIM, TENANT);
    // Whoever was stopped finds itself shut out, and may have nothing to say about it.
    let outcome = client.add_node(NODE, Box::new(doomed)).and_then(|()| live(&mut client));
    std::process::exit(if outcome.is_ok() { 0 } else { 3 });
}

fn write_for_ever(client: &mut PoolClient) -> Result<(), PoolError> {
    let memory = Arc::new(Memory::create("data", DATA_BYTES).expect("memory"));
    memory.write(0, &[0xee; DATA_BYTES]);
    let local = client.endpoint(NODE).expect("it is connected").register_local(memory).expect("room");
    let section = client.allocate(NODE, SizeClass::SECTION)?;
    tell(&section);
    while client.endpoint(NODE).is_some_and(|endpoint| !endpoint.is_broken()) {
        write(client, &section, local);
        // Who is shut out is told so.
        client.refresh(NODE)?;
    }
    Ok(())
}

/// All that a host does, each in several states of its spans and sections.
fn live(client: &mut PoolClient) -> Result<(), PoolError> {
    let memory = Arc::new(Memory::create("data", DATA_BYTES).expect("memory"));
    memory.write(0, &[0xee; DATA_BYTES]);
    let endpoint = client.endpoint(NODE).expect("it is connected");
    let local = endpoint.register_local(memory).expect("room");
    let take = |client: &mut PoolClient, k: u8| -> Result<Extent, PoolError> {
        let extent = client.allocate(NODE, SizeClass::new(k).expect("a class"))?;
        tell(&extent);
        write(client, &extent, local);
        Ok(extent)
    };
    let first = take(client, 0)?;
    let second = take(client, 0)?;
    let half = take(client, 4)?;
    client.free(second)?;
    let span = take(client, 5)?;
    let group = take(client, 7)?;
    let other = take(client, 3)?;
    client.free(first)?;
    client.free(half)?;
    client.free(span)?;
    for k in [0, 0, 4, 1] {
        let again = take(client, k)?;
        client.free(again)?;
    }
    // Spans are filled, so that others must be opened, and emptied again.
    let halves = (0..7).map(|_| take(client, 4)).collect::<Result<Vec<_>, _>>()?;
    client.free(other)?;
    for half in halves {
        client.free(half)?;
    }
    client.free(group)?;
    let section = take(client, 9)?;
    client.free(section)?;
    let many = client.allocate_many(NODE, SizeClass::CHUNK, 3)?;
    let spans = client.allocate_many(NODE, SizeClass::SPAN, 2)?;
    let several = [many, spans].concat();
    several.iter().for_each(tell);
    client.free_many(NODE, &several)?.into_iter().collect::<Result<(), _>>()?;
    client.recover(NODE, EARLIER)?;
    let stretch = client.allocate_stretch(NODE, 2)?;
    stretch.extents().for_each(|section| tell(&section));
    for section in stretch.extents() {
        write(client, &section, local);
        client.free(section)?;
    }
    Ok(())
}

/// Some of an extent; whatever becomes of it, completions are of no interest.
fn write(client: &mut PoolClient, extent: &Extent, key: LocalKey) {
    let endpoint = client.endpoint(NODE).expect("it is connected");
    let len = u32::try_from(extent.class.bytes()).expect("2 MiB at most");
    let verb = Verb::Write {
        local: LocalSlice { key, offset: 0, len },
        remote: RemoteAddr { addr: extent.addr, key: extent.key },
    };
    endpoint.post(&[Work { id: 1, verb, signalled: true }]).expect("room");
    let mut done: Vec<Completion> = Vec::new();
    while endpoint.poll(&mut done, 1) == 0 && !endpoint.is_broken() {
        endpoint.wait(Duration::from_millis(10));
    }
}

/// An endpoint whose process ends at some step.
#[derive(Debug)]
struct Doomed {
    inner: Box<dyn Endpoint>,
    left: usize,
    moment: Moment,
    signal: Signal,
}

impl Doomed {
    fn end(&self) {
        kill_process(getpid(), self.signal).expect("it is this process");
        // Another thread may be the one that is told first.
        let _ended = std::io::stdin().read(&mut [0]);
    }
}

impl Endpoint for Doomed {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let is_last = self.left == 0;
        self.left = self.left.wrapping_sub(1);
        if is_last && self.moment == Moment::Before {
            self.end();
        }
        let posted = self.inner.post(batch);
        if is_last && self.moment == Moment::After {
            self.end();
        }
        posted
    }

    forward_endpoint!(inner: poll, wait, poll_fd, register_local, receive, regions, limits, is_broken, late);
}
