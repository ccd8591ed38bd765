//! Attacks of one tenant on another, which works meanwhile. No attack succeeds, and no other tenant
//! is disturbed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering::{Relaxed, Release};

use aquifer_channel::{RingMapping, connect, receive_frame, send_frame, wakeup};
use aquifer_client::{Error, Extent, Session};
use aquifer_ipc::Frame;
use aquifer_ipc::ring::{DATA_AT, RingWords};
use aquifer_tests_e2e::SharedCluster;
use aquifer_tests_e2e::checked::{Checked, Random};
use aquifer_tests_support::skip;
use rustix::process::geteuid;

/// The hostile users, one for each attack: a user's sessions are limited.
const FIRST_HOSTILE: u32 = 65_400;
const QUOTA_BYTES: u64 = 64 << 20;
/// Environment variable of the hostile process, with the agent's socket.
const HOSTILE_VARIABLE: &str = "AQUIFER_TEST_HOSTILE";
/// Start of a node's first region, whose words, keys and logs have more than 1 MiB here.
const METADATA_AT: u64 = 2 << 20;
/// Operations of the victim between two attacks.
const TURNS: usize = 150;
/// Number of keys that a session may try at once. Only the attack `a_storm_of_guesses` exceeds it.
const TRIES_MAX: usize = 32;
const STORM: usize = 400;
const NOISES: usize = 20;
const SESSIONS_MAX: usize = 64;

/// Extents of the victim, as the hostile process knows them.
type Names = Vec<Extent>;

/// An attack. Returns a text about its attempts; panics if it succeeds.
const ATTACKS: [fn(&Path, &Names, &mut Random) -> String; 11] = [
    foreign_names,
    stale_names,
    neighbours_above,
    neighbours_below,
    neighbours_elsewhere,
    larger_sizes,
    metadata,
    a_storm_of_guesses,
    noise_in_the_ring,
    more_than_its_quota,
    more_sessions_than_it_may,
];

fn open(agent: &Path) -> Session {
    Session::open_at(agent).expect("each user can open a session")
}

/// Asserts that an extent cannot be read, written or freed. This uses two of the session's tries.
fn assert_closed(session: &mut Session, extent: &Extent) {
    let mut bytes = vec![0; 4096];
    let read = session.read(extent, 0, &mut bytes);
    assert!(is_refused(&read), "{extent:?} was read: {read:?}");
    let written = session.write(extent, 0, &[0xee; 4096]);
    assert!(is_refused(&written), "{extent:?} was written: {written:?}");
    let freed = session.free(*extent);
    assert!(freed.is_err(), "{extent:?} was freed");
}

fn is_refused(outcome: &Result<(), Error>) -> bool {
    matches!(outcome, Err(Error::AccessDenied | Error::TooManyWrongKeys | Error::Failed))
}

fn renamed(extent: &Extent, addr: u64, bytes: u64) -> Extent {
    Extent::from_parts(extent.node(), addr, extent.key(), bytes).expect("it could be one")
}

/// The victim's extents, with the right addresses and keys.
fn foreign_names(agent: &Path, names: &Names, _: &mut Random) -> String {
    let mut session = open(agent);
    let tried = &names[..names.len().min(TRIES_MAX / 2)];
    tried.iter().for_each(|extent| assert_closed(&mut session, extent));
    format!("{} foreign names", tried.len())
}

/// Own extents after they were freed. Another tenant may have the memory by now.
fn stale_names(agent: &Path, _: &Names, _: &mut Random) -> String {
    let mut before = open(agent);
    let held: Vec<Extent> = (0..10).map(|k| before.allocate(4096 << k).expect("within its quota")).collect();
    before.free_many(&held).expect("they are its own");
    held.iter().for_each(|extent| assert_closed(&mut before, extent));
    drop(before);
    let mut session = open(agent);
    for extent in &held {
        // Until the agent has freed the session's stock the user may access it, and no try is
        // counted.
        while session.read(extent, 0, &mut [0; 8]).is_ok() {
            std::thread::yield_now();
        }
        assert_closed(&mut session, extent);
    }
    format!("{} stale names", held.len())
}

/// Memory beside an own extent, with the key of that extent.
fn neighbours(agent: &Path, beside: fn(u64, u64) -> u64) -> String {
    let mut session = open(agent);
    for k in 0..10 {
        let bytes = 4096 << k;
        let own = session.allocate(bytes).expect("within its quota");
        assert_closed(&mut session, &renamed(&own, beside(own.addr(), bytes), bytes));
    }
    "neighbours of every size".into()
}

fn neighbours_above(agent: &Path, _: &Names, _: &mut Random) -> String {
    neighbours(agent, |addr, bytes| addr + bytes)
}

fn neighbours_below(agent: &Path, _: &Names, _: &mut Random) -> String {
    neighbours(agent, |addr, bytes| addr - bytes)
}

fn neighbours_elsewhere(agent: &Path, _: &Names, _: &mut Random) -> String {
    neighbours(agent, |addr, _| addr ^ 1 << 21)
}

/// Own extents with a larger size.
fn larger_sizes(agent: &Path, _: &Names, _: &mut Random) -> String {
    let mut session = open(agent);
    let own = session.allocate(4096).expect("within its quota");
    for k in 1..10 {
        assert_closed(&mut session, &renamed(&own, own.addr(), 4096 << k));
    }
    "larger sizes".into()
}

/// The words, keys and logs of the nodes.
fn metadata(agent: &Path, _: &Names, random: &mut Random) -> String {
    let mut session = open(agent);
    let own = session.allocate(4096).expect("within its quota");
    for _ in 0..TRIES_MAX / 4 {
        let addr = METADATA_AT + random.below(1 << 20) as u64 / 4096 * 4096;
        assert!(addr < own.addr(), "data lies behind metadata");
        assert_closed(&mut session, &renamed(&own, addr, 4096));
        let key = u32::try_from(random.below(1 << 30)).expect("30 bits");
        let forged = Extent::from_parts(own.node(), addr, key, 4096).expect("it could be one");
        assert_closed(&mut session, &forged);
    }
    "metadata".into()
}

/// The victim's addresses, with random keys.
fn a_storm_of_guesses(agent: &Path, names: &Names, random: &mut Random) -> String {
    let mut session = open(agent);
    for _ in 0..STORM {
        let Some(extent) = names.get(random.below(names.len().max(1))) else { break };
        let key = extent.key() ^ 1 << random.below(32);
        let guess = Extent::from_parts(extent.node(), extent.addr(), key, extent.bytes());
        assert_closed(&mut session, &guess.expect("it could be one"));
    }
    format!("{STORM} guesses")
}

fn noise_in_the_ring(agent: &Path, _: &Names, random: &mut Random) -> String {
    for round in 0..NOISES {
        let socket = connect(agent).expect("the agent listens");
        send_frame(&socket, &Frame::OpenSession, &[]).expect("the agent reads");
        let (frame, fds) = receive_frame(&socket).expect("it answers");
        assert_eq!(frame, Frame::SessionOpened);
        let ring = RingMapping::new(&fds[0]).expect("memory");
        for _ in 0..100 {
            let at = 64 + random.below(DATA_AT / 8 - 8) * 8;
            let noise = (random.below(1 << 31) as u64) << 33 ^ random.below(1 << 31) as u64;
            ring.word_u64(at).store(noise & !0xf8, Relaxed);
            let answered = ring.word_u32(128).load(Relaxed);
            let count = u32::try_from(random.below(if round % 2 == 0 { 20 } else { 4000 })).expect("small");
            ring.word_u32(64).store(answered.wrapping_add(count), Release);
            wakeup::notify(&socket);
        }
    }
    format!("noise in {NOISES} rings")
}

fn more_than_its_quota(agent: &Path, _: &Names, _: &mut Random) -> String {
    let mut sessions: Vec<Session> = (0..4).map(|_| open(agent)).collect();
    let mut taken = 0;
    for session in &mut sessions {
        loop {
            match session.allocate(1 << 20) {
                Ok(extent) => taken += extent.bytes(),
                Err(Error::QuotaExceeded) => break,
                Err(error) => panic!("another reason: {error}"),
            }
        }
    }
    assert!(taken <= QUOTA_BYTES, "{taken} bytes");
    format!("{taken} bytes and no more")
}

fn more_sessions_than_it_may(agent: &Path, _: &Names, _: &mut Random) -> String {
    let sessions: Vec<Session> = std::iter::from_fn(|| Session::open_at(agent).ok()).take(1000).collect();
    assert!(sessions.len() <= SESSIONS_MAX, "{} sessions", sessions.len());
    format!("{} sessions and no more", sessions.len())
}

/// The main function of the hostile process; not a test by itself. A line from its parent names the
/// attack and the victim's extents.
#[test]
fn be_hostile() {
    let Some(agent) = std::env::var_os(HOSTILE_VARIABLE) else { return };
    let mut random = Random(0x5eed);
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("text");
        let mut words = line.split(' ');
        let attack: usize = words.next().and_then(|word| word.parse().ok()).expect("its number");
        let names = words.map(extent_of).collect();
        eprintln!("{}", ATTACKS[attack](Path::new(&agent), &names, &mut random));
    }
}

fn name_of(extent: &Extent) -> String {
    format!("{}:{}:{}:{}", extent.node(), extent.addr(), extent.key(), extent.bytes())
}

fn extent_of(name: &str) -> Extent {
    let parts: Vec<u64> = name.split(':').map(|part| part.parse().expect("a number")).collect();
    let small = |at: usize| u32::try_from(parts[at]).expect("32 bits");
    let node = u16::try_from(parts[0]).expect("16 bits");
    Extent::from_parts(node, parts[1], small(2), parts[3]).expect("an extent")
}

fn start_hostile(shared: &SharedCluster, uid: u32) -> Child {
    let mut command = shared.plain_command(uid, &shared.path("hostile"));
    command.args(["--exact", "tenants::be_hostile", "--nocapture"]);
    command.env(HOSTILE_VARIABLE, shared.path("agent.sock"));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("setpriv can be started")
}

/// Runs an attack by a user of its own while the victim works; returns the text of the attack.
fn attack_once(shared: &SharedCluster, victim: &mut Checked, attack: usize, uid: u32) -> String {
    let mut hostile = start_hostile(shared, uid);
    let names: Vec<String> = victim.held.keys().map(name_of).collect();
    let mut orders = hostile.stdin.take().expect("it is a pipe");
    writeln!(orders, "{attack} {}", names.join(" ")).expect("it listens");
    drop(orders);
    let mut said = BufReader::new(hostile.stderr.take().expect("it is a pipe"));
    let outcome = std::thread::scope(|scope| {
        let all = scope.spawn(move || std::io::read_to_string(&mut said).expect("text"));
        while !all.is_finished() {
            victim.turn();
        }
        all.join().expect("it is read")
    });
    assert!(hostile.wait().expect("it is ours").success(), "an attack has succeeded: {outcome}");
    outcome.trim().to_owned()
}

/// Runs all attacks while the victim works.
fn play(fabric: &str) {
    if !geteuid().is_root() || !Path::new("/usr/bin/setpriv").exists() {
        skip("only root can be another user");
        return;
    }
    let quota = QUOTA_BYTES.to_string();
    let shared = SharedCluster::up_with(2, &["--fabric", fabric, "--extents-per-user", &quota]);
    let mut victim = Checked::open(&shared.cluster, 7);
    let this = std::env::current_exe().expect("this test");
    std::fs::copy(this, shared.path("hostile")).expect("our own folder");
    for (attack, uid) in (0..ATTACKS.len()).zip(FIRST_HOSTILE..) {
        (0..TURNS).for_each(|_| victim.turn());
        let outcome = attack_once(&shared, &mut victim, attack, uid);
        println!("{fabric}: {outcome}");
        victim.verify_all();
    }
    // The agent counts wrong keys for each user, and logs the user.
    let status = shared.cluster.status();
    let users = status["agent"]["users"].as_array().expect("users");
    let hostile = users.iter().find(|user| user["tenant"] == FIRST_HOSTILE);
    assert!(hostile.is_some_and(|user| user["refused"].as_u64() > Some(0)), "{users:?}");
    assert!(
        shared.cluster.logs().contains("refused requests of a user with wrong keys"),
        "{}",
        shared.cluster.logs()
    );
    victim.verify_all();
    drop(victim);
    shared.cluster.assert_all_free();
}

#[test]
fn attacks_of_a_tenant_fail_and_disturb_no_other() {
    play("shm");
}

#[test]
fn attacks_of_a_tenant_fail_and_disturb_no_other_over_tcp() {
    play("tcp");
}
