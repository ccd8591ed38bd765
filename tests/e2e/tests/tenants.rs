//! One tenant against another: with all that a hostile one could know, and everything that it can do, while the other works. Nothing of it succeeds, and nobody
//! else is disturbed.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering::{Relaxed, Release};

use aquifer_channel::{Mapping, bell, connect, receive_frame, send_frame};
use aquifer_client::{Error, Extent, Session};
use aquifer_ipc::Frame;
use aquifer_ipc::ring::{DATA_AT, Words};
use aquifer_tests_e2e::House;
use aquifer_tests_e2e::checked::{Checked, Random};
use rustix::process::geteuid;

const BERT: u32 = 65_532;
const QUOTA_BYTES: u64 = 64 << 20;
/// Set for the hostile process: the agent's socket.
const HOSTILE_VARIABLE: &str = "AQUIFER_TEST_HOSTILE";
/// What the victim does between two attacks.
const TURNS: usize = 150;
const GUESSES: usize = 400;
const NOISES: usize = 20;
const SESSIONS_MAX: usize = 64;

/// What the hostile process is told of the victim's, for the attack on it.
type Names = Vec<Extent>;

/// Each returns a sentence of what was tried, or panics: then it has succeeded.
const ATTACKS: [fn(&Path, &Names, &mut Random) -> String; 9] = [
    foreign_names,
    stale_names,
    neighbours,
    larger_sizes,
    metadata,
    guesses,
    noise_in_the_ring,
    more_than_its_quota,
    more_sessions_than_it_may,
];

fn open(agent: &Path) -> Session {
    Session::open_at(agent).expect("whoever is a user has a session")
}

/// Neither read nor written, whatever the answer is called.
fn assert_closed(session: &mut Session, extent: &Extent) {
    let mut bytes = vec![0; 4096];
    let read = session.read(extent, 0, &mut bytes);
    assert!(matches!(read, Err(Error::NotYours | Error::Failed)), "{extent:?} was read: {read:?}");
    let written = session.write(extent, 0, &[0xee; 4096]);
    assert!(matches!(written, Err(Error::NotYours | Error::Failed)), "{extent:?} was written: {written:?}");
    let freed = session.free(*extent);
    assert!(freed.is_err(), "{extent:?} was given back");
}

fn renamed(extent: &Extent, addr: u64, bytes: u64) -> Extent {
    Extent::named(extent.node(), addr, extent.key(), bytes).expect("it could be one")
}

/// The victim's extents, by their right names and keys.
fn foreign_names(agent: &Path, names: &Names, _: &mut Random) -> String {
    let mut session = open(agent);
    names.iter().for_each(|extent| assert_closed(&mut session, extent));
    format!("{} foreign names", names.len())
}

/// What was its own, by the names of then; another may have it by now.
fn stale_names(agent: &Path, _: &Names, _: &mut Random) -> String {
    let mut before = open(agent);
    let held: Vec<Extent> = (0..40).flat_map(|k| before.allocate(4096 << (k % 10))).collect();
    before.free_many(&held).expect("they are its own");
    let mut same = before;
    let mut other = open(agent);
    for extent in &held {
        assert_closed(&mut same, extent);
        assert_closed(&mut other, extent);
    }
    format!("{} stale names", held.len())
}

/// What lies beside its own, with the key of its own.
fn neighbours(agent: &Path, _: &Names, _: &mut Random) -> String {
    let mut session = open(agent);
    for k in 0..10 {
        let bytes = 4096 << k;
        let own = session.allocate(bytes).expect("within its quota");
        for addr in [own.addr().wrapping_add(bytes), own.addr().wrapping_sub(bytes), own.addr() ^ 1 << 21] {
            assert_closed(&mut session, &renamed(&own, addr, bytes));
        }
    }
    "neighbours of every size".into()
}

/// Its own, as if it were larger.
fn larger_sizes(agent: &Path, _: &Names, _: &mut Random) -> String {
    let mut session = open(agent);
    let own = session.allocate(4096).expect("within its quota");
    for k in 1..10 {
        assert_closed(&mut session, &renamed(&own, own.addr(), 4096 << k));
    }
    "larger sizes".into()
}

/// Where nodes keep their words, keys and logs.
fn metadata(agent: &Path, _: &Names, random: &mut Random) -> String {
    let mut session = open(agent);
    let own = session.allocate(4096).expect("within its quota");
    for _ in 0..200 {
        // Data begins at a multiple of 2 MiB; what is before the first is metadata.
        let addr = (own.addr() & !0xffff_ffff) + random.below(4 << 20) as u64 / 4096 * 4096;
        if addr != own.addr() {
            assert_closed(&mut session, &renamed(&own, addr, 4096));
        }
        let key = u32::try_from(random.below(1 << 30)).expect("30 bits");
        let forged = Extent::named(own.node(), addr, key, 4096).expect("it could be one");
        assert_closed(&mut session, &forged);
    }
    "metadata".into()
}

/// The victim's places, with any key.
fn guesses(agent: &Path, names: &Names, random: &mut Random) -> String {
    let mut session = open(agent);
    for _ in 0..GUESSES {
        let Some(extent) = names.get(random.below(names.len().max(1))) else { break };
        let key = extent.key() ^ 1 << random.below(32);
        let guess = Extent::named(extent.node(), extent.addr(), key, extent.bytes());
        assert_closed(&mut session, &guess.expect("it could be one"));
    }
    format!("{GUESSES} guesses")
}

fn noise_in_the_ring(agent: &Path, _: &Names, random: &mut Random) -> String {
    for round in 0..NOISES {
        let socket = connect(agent).expect("the agent listens");
        send_frame(&socket, &Frame::OpenSession, &[]).expect("it hears");
        let (frame, fds) = receive_frame(&socket).expect("it answers");
        assert_eq!(frame, Frame::SessionOpened);
        let ring = Mapping::new(&fds[0]).expect("memory");
        for _ in 0..100 {
            let at = 64 + random.below(DATA_AT / 8 - 8) * 8;
            let noise = (random.below(1 << 31) as u64) << 33 ^ random.below(1 << 31) as u64;
            ring.word_u64(at).store(noise & !0xf8, Relaxed);
            let answered = ring.word_u32(128).load(Relaxed);
            let count = u32::try_from(random.below(if round % 2 == 0 { 20 } else { 4000 })).expect("small");
            ring.word_u32(64).store(answered.wrapping_add(count), Release);
            bell::ring(&socket);
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
                Err(Error::Quota) => break,
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

/// Not a test by itself: what the hostile user runs. A line from its parent is an attack, and the names that it may use for it.
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
    Extent::named(node, parts[1], small(2), parts[3]).expect("an extent")
}

fn start_hostile(house: &House) -> Child {
    let program = house.path("hostile");
    std::fs::copy(std::env::current_exe().expect("this test"), &program).expect("our own folder");
    let mut command = house.plain_command(BERT, &program);
    command.args(["--exact", "be_hostile", "--nocapture"]);
    command.env(HOSTILE_VARIABLE, house.path("agent.sock"));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().expect("setpriv can be started")
}

/// The victim works, an attack is made, the victim works on; and so on.
fn play(fabric: &str) {
    if !geteuid().is_root() || !Path::new("/usr/bin/setpriv").exists() {
        println!("skipped: only root can be another user");
        return;
    }
    let quota = QUOTA_BYTES.to_string();
    let house = House::build_with(2, &["--fabric", fabric, "--extents-per-user", &quota]);
    let mut victim = Checked::open(&house.cluster, 7);
    let mut hostile = start_hostile(&house);
    let mut orders = hostile.stdin.take().expect("it is a pipe");
    let mut said = BufReader::new(hostile.stderr.take().expect("it is a pipe")).lines();
    for attack in 0..ATTACKS.len() {
        (0..TURNS).for_each(|_| victim.turn());
        let names: Vec<String> = victim.held.keys().map(name_of).collect();
        writeln!(orders, "{attack} {}", names.join(" ")).expect("it listens");
        let outcome = std::thread::scope(|scope| {
            let attack = scope.spawn(|| said.next().expect("it says what it did").expect("text"));
            while !attack.is_finished() {
                victim.turn();
            }
            attack.join().expect("it reads")
        });
        assert!(!outcome.contains("panicked") && !outcome.is_empty(), "an attack has succeeded: {outcome}");
        println!("{fabric}: {outcome}");
        victim.verify_all();
    }
    drop(orders);
    assert!(hostile.wait().expect("it is ours").success());
    // Whoever tries keys is counted, and named in the log.
    let status = house.cluster.status();
    let users = status["agent"]["users"].as_array().expect("users");
    let refused = users.iter().find(|user| user["tenant"] == BERT).and_then(|user| user["refused"].as_u64());
    assert!(refused > Some(0), "{users:?}");
    assert!(house.cluster.logs().contains("try keys that open nothing"), "{}", house.cluster.logs());
    victim.verify_all();
    drop(victim);
    house.cluster.assert_all_free();
}

#[test]
fn a_hostile_tenant_gets_nothing_and_disturbs_nobody() {
    play("shm");
}

#[test]
fn a_hostile_tenant_gets_nothing_and_disturbs_nobody_over_tcp() {
    play("tcp");
}
