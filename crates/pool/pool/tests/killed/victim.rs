//! The victim: a host that allocates, writes and frees extents of all sizes, and recovers another
//! host, until it is killed or stopped.

use std::io::{Read, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use aquifer_fabric::ClusterKey;
use aquifer_fabric::tcp::ConnectOptions;
use aquifer_fabric::{
    Completion, Endpoint, FabricAddress, Host, Identity, Key, LocalKey, LocalSlice, Memory, PostError,
    RemoteAddr, Tenant, Verb, Work, forward_endpoint,
};
use aquifer_pool::{Extent, NodeId, PoolClient, PoolError, SizeClass};
use rustix::process::{Pid, Signal, getpid, kill_process};

pub const NODE: NodeId = NodeId(7);
pub const TENANT: Tenant = Tenant(0);
pub const VICTIM: Host = Host(2);
/// A host that is dead when the victim begins.
pub const EARLIER: Host = Host(3);
pub const KEY: ClusterKey = ClusterKey([3; 32]);

const VARIABLE: &str = "AQUIFER_TEST_VICTIM";
pub const DATA_BYTES: usize = 2 << 20;

/// The end of the victim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VictimEnd {
    /// SIGKILL.
    Kill,
    /// SIGSTOP: the victim may be continued later.
    Stop,
    /// The victim writes the same section repeatedly, until the test stops it.
    Write,
}

/// The moment of the victim's end: before a step is posted, or after it is posted and before its
/// completion is polled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepMoment {
    Before,
    After,
}

/// A victim that was started.
pub struct Victim {
    pub pid: Pid,
    /// The victim's input. As long as it is open, the victim does not continue after it was
    /// stopped.
    pub stdin: ChildStdin,
    /// The victim's output with its granted extents: see [`granted`].
    pub stdout: ChildStdout,
}

/// Starts a victim.
#[expect(clippy::zombie_processes, reason = "the test waits by process id: the child may only be stopped")]
pub fn start(reach: &FabricAddress, epoch: u64, step: usize, moment: StepMoment, end: VictimEnd) -> Victim {
    let arguments = format!("{} {} {epoch} {step} {moment:?} {end:?}", reach.provider(), reach.address());
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", super::VICTIM_TEST, "--nocapture"]).env(VARIABLE, arguments);
    command.stdout(Stdio::piped()).stdin(Stdio::piped());
    let mut child = command.spawn().expect("this program can be started");
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process")).expect("a process");
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    Victim { pid, stdin: stdin.expect("the stream is piped"), stdout: stdout.expect("the stream is piped") }
}

/// The prefix of each output line with a granted extent.
const GRANTED: &str = "granted ";

/// Reports that the victim owns an extent and has its key.
fn report(extent: &Extent) {
    let mut stdout = std::io::stdout().lock();
    let (k, key) = (extent.class.k(), extent.key.0);
    writeln!(stdout, "{GRANTED}{} {k} {key}", extent.addr)
        .and_then(|()| stdout.flush())
        .expect("the test reads it");
}

/// The extents that were granted to a victim, which must have ended or be stopped.
pub fn granted(victim: &mut Victim) -> impl Iterator<Item = Extent> + use<> {
    rustix::io::ioctl_fionbio(&victim.stdout, true).expect("the output is a pipe");
    let mut output = Vec::new();
    // Reads to the end, or to the last byte that the victim has written.
    let _ = victim.stdout.read_to_end(&mut output);
    let output = String::from_utf8(output).expect("the output is text");
    let extents: Vec<Extent> = output.lines().filter_map(parse_granted).collect();
    extents.into_iter()
}

/// Parses a line of a victim's output.
fn parse_granted(line: &str) -> Option<Extent> {
    let mut words = line.strip_prefix(GRANTED)?.split(' ');
    let addr = words.next()?.parse().ok()?;
    let class = SizeClass::new(words.next()?.parse().ok()?)?;
    let key = Key(words.next()?.parse().ok()?);
    Some(Extent { node: NODE, addr, class, key })
}

/// Runs the victim, if this process was started as one.
pub fn run_if_started() {
    let Ok(arguments) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = arguments.split(' ').collect();
    let [provider, address, epoch, step, moment, end] = words[..] else { panic!("{arguments}") };
    let reach = FabricAddress::parse(provider, address).expect("an address of the node");
    let who = Identity { host: VICTIM, epoch: epoch.parse().expect("a number"), tenant: TENANT };
    let inner = reach.connect(who, Some(&KEY), &ConnectOptions::default()).expect("the node listens");
    let ending = EndingEndpoint {
        inner,
        steps_left: step.parse().expect("a number"),
        moment: if moment == "Before" { StepMoment::Before } else { StepMoment::After },
        signal: if end == "Kill" { Signal::KILL } else { Signal::STOP },
    };
    let script = if end == "Write" { write_for_ever } else { run_script };
    let mut client = PoolClient::new(VICTIM, TENANT);
    // A victim that was stopped finds that it is fenced, and may then exit with an error.
    let outcome = client.add_node(NODE, Box::new(ending)).and_then(|()| script(&mut client));
    std::process::exit(if outcome.is_ok() { 0 } else { 3 });
}

fn write_for_ever(client: &mut PoolClient) -> Result<(), PoolError> {
    let memory = Arc::new(Memory::create("data", DATA_BYTES).expect("memory"));
    memory.write(0, &[0xee; DATA_BYTES]);
    let local = client.endpoint(NODE).expect("the node is connected").register_local(memory).expect("room");
    let section = client.allocate(NODE, SizeClass::SECTION)?;
    report(&section);
    while client.endpoint(NODE).is_some_and(|endpoint| !endpoint.is_broken()) {
        write(client, &section, local);
        // This fails when the host is fenced.
        client.refresh(NODE)?;
    }
    Ok(())
}

/// Executes all operations of a host, in several states of spans and sections.
fn run_script(client: &mut PoolClient) -> Result<(), PoolError> {
    let memory = Arc::new(Memory::create("data", DATA_BYTES).expect("memory"));
    memory.write(0, &[0xee; DATA_BYTES]);
    let endpoint = client.endpoint(NODE).expect("the node is connected");
    let local = endpoint.register_local(memory).expect("room");
    let allocate = |client: &mut PoolClient, k: u8| -> Result<Extent, PoolError> {
        let extent = client.allocate(NODE, SizeClass::new(k).expect("a class"))?;
        report(&extent);
        write(client, &extent, local);
        Ok(extent)
    };
    let first = allocate(client, 0)?;
    let second = allocate(client, 0)?;
    let half = allocate(client, 4)?;
    client.free(second)?;
    let span = allocate(client, 5)?;
    let group = allocate(client, 7)?;
    let other = allocate(client, 3)?;
    client.free(first)?;
    client.free(half)?;
    client.free(span)?;
    for k in [0, 0, 4, 1] {
        let again = allocate(client, k)?;
        client.free(again)?;
    }
    // Fills spans, so that others must be opened, and empties them again.
    let halves = (0..7).map(|_| allocate(client, 4)).collect::<Result<Vec<_>, _>>()?;
    client.free(other)?;
    for half in halves {
        client.free(half)?;
    }
    client.free(group)?;
    let section = allocate(client, 9)?;
    client.free(section)?;
    let many = client.allocate_many(NODE, SizeClass::CHUNK, 3)?;
    let spans = client.allocate_many(NODE, SizeClass::SPAN, 2)?;
    let several = [many, spans].concat();
    several.iter().for_each(report);
    client.free_many(NODE, &several)?.into_iter().collect::<Result<(), _>>()?;
    client.recover(NODE, EARLIER)?;
    let stretch = client.allocate_stretch(NODE, 2)?;
    stretch.extents().for_each(|section| report(&section));
    for section in stretch.extents() {
        write(client, &section, local);
        client.free(section)?;
    }
    Ok(())
}

/// Writes an extent, and ignores the outcome.
fn write(client: &mut PoolClient, extent: &Extent, key: LocalKey) {
    let endpoint = client.endpoint(NODE).expect("the node is connected");
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

/// An endpoint that ends its process at a step.
#[derive(Debug)]
struct EndingEndpoint {
    inner: Box<dyn Endpoint>,
    /// Steps before the last one.
    steps_left: usize,
    moment: StepMoment,
    signal: Signal,
}

impl EndingEndpoint {
    fn end(&self) {
        kill_process(getpid(), self.signal).expect("the signal is for this process");
        // The signal may be delivered to another thread first.
        let _ended = std::io::stdin().read(&mut [0]);
    }
}

impl Endpoint for EndingEndpoint {
    fn post(&mut self, batch: &[Work]) -> Result<(), PostError> {
        let is_last = self.steps_left == 0;
        self.steps_left = self.steps_left.wrapping_sub(1);
        if is_last && self.moment == StepMoment::Before {
            self.end();
        }
        let posted = self.inner.post(batch);
        if is_last && self.moment == StepMoment::After {
            self.end();
        }
        posted
    }

    forward_endpoint!(
        inner: poll, wait, poll_fd, register_local, receive, regions, limits, is_broken, drain_handle
    );
}
