//! `aquifer core`: the core dump has all pages of a program, wherever they are, and the program
//! continues.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};

use aquifer_tests_e2e::cluster::text;
use aquifer_tests_e2e::restart::figure;
use aquifer_tests_e2e::{Cluster, build, eventually};
use rustix::process::Signal;
use tempfile::TempDir;

const PAGES: u64 = 16_384;

/// Fills pages, prints where they are, waits for a line, and checks them.
const PROGRAM: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>
enum { PAGES = 16384 };
static unsigned long *area;
static void *wait_for_ever(void *unused) { for (;;) pause(); return unused; }
int main(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, wait_for_ever, NULL);
    area = mmap(NULL, PAGES * 4096ul, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (unsigned long i = 0; i < PAGES; i++) { area[i * 512] = i * 3 + 1; area[i * 512 + 511] = ~i; }
    printf("%d %lu\n", getpid(), (unsigned long)area);
    fflush(stdout);
    if (getchar() == EOF) return 2;
    for (unsigned long i = 0; i < PAGES; i++)
        if (area[i * 512] != i * 3 + 1 || area[i * 512 + 511] != ~i) return 3;
    puts("right");
    return 0;
}
"#;

/// A program on the pool.
struct Waiting {
    child: std::process::Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
    pid: String,
    area: u64,
}

fn start(cluster: &Cluster, folder: &Path) -> Waiting {
    let program = build::compile(folder, "waiting", PROGRAM, &["-pthread"]);
    let mut command = cluster.run_command("16M", &[program.to_str().expect("a plain path")]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("aquifer can be started");
    let mut output = BufReader::new(child.stdout.take().expect("it is a pipe"));
    let mut line = String::new();
    output.read_line(&mut line).expect("the program says where its pages are");
    let (pid, area) = line.trim().split_once(' ').expect("two numbers");
    let (pid, area) = (pid.to_owned(), area.parse().expect("an address"));
    let input = child.stdin.take().expect("it is a pipe");
    Waiting { child, input, output, pid, area }
}

fn u64_at(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).expect("the file is small");
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn u16_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes")))
}

/// Where an address is in a core dump, by the program headers of the ELF file.
fn place_in(core: &[u8], address: u64) -> u64 {
    assert_eq!(&core[..5], b"\x7fELF\x02");
    let (first, size, count) = (u64_at(core, 32), u16_at(core, 54), u16_at(core, 56));
    let headers = (0..count).map(|number| first + number * size);
    let found = headers.map(|at| (u64_at(core, at + 8), u64_at(core, at + 16), u64_at(core, at + 32)));
    let is_in = |(_, start, size): &(u64, u64, u64)| (*start..start + size).contains(&address);
    let (offset, start, _) = found.into_iter().find(is_in).expect("the address is in the core dump");
    offset + address - start
}

#[test]
fn a_core_dump_has_the_pages_that_are_away() {
    let cluster = Cluster::up(1, "128M");
    let folder = TempDir::new().expect("a folder");
    let Waiting { mut child, mut input, mut output, pid, area } = start(&cluster, folder.path());
    eventually("pages to leave", || (figure(&cluster, "evictions")? > PAGES / 2).then_some(()));
    let path = folder.path().join("core");
    let dumped = cluster.command().args(["core", &pid, "--output"]).arg(&path).output();
    let dumped = dumped.expect("aquifer can be started");
    assert!(dumped.status.success(), "{}", text(&dumped.stderr));
    let core = std::fs::read(&path).expect("the core dump was written");
    let first = place_in(&core, area);
    for page in 0..PAGES {
        let at = first + page * 4096;
        assert_eq!((u64_at(&core, at), u64_at(&core, at + 4088)), (page * 3 + 1, !page), "page {page}");
    }
    input.write_all(b"\n").expect("the program waits for a line");
    let mut line = String::new();
    output.read_line(&mut line).expect("the program continues");
    assert_eq!(line, "right\n");
    assert!(child.wait().expect("it ends").success());
    cluster.assert_all_free();
}

#[test]
fn a_debugger_reads_the_core_dump() {
    if Command::new("gdb").arg("--version").output().is_err() {
        return aquifer_tests_support::skip("there is no gdb");
    }
    let cluster = Cluster::up(1, "128M");
    let folder = TempDir::new().expect("a folder");
    let Waiting { mut child, input, pid, .. } = start(&cluster, folder.path());
    let path = folder.path().join("core");
    let dumped = cluster.command().args(["core", &pid, "--output"]).arg(&path).output();
    let dumped = dumped.expect("aquifer can be started");
    assert!(dumped.status.success(), "{}", text(&dumped.stderr));
    let mut gdb = Command::new("gdb");
    gdb.args(["-batch", "-ex", "info threads", "-ex", "print (*(unsigned long **)&area)[512 * 12345]"]);
    let output = gdb.arg(folder.path().join("waiting")).arg(&path).output().expect("gdb can be started");
    let shown = text(&output.stdout);
    assert!(shown.contains(&(12_345 * 3 + 1).to_string()), "{shown}{}", text(&output.stderr));
    assert!(shown.contains("pause"), "the threads are where they were: {shown}");
    drop(input);
    let _ = child.wait();
}

#[test]
fn the_gap_in_a_core_dump_of_the_kernel_is_reported() {
    let folder = TempDir::new().expect("a folder");
    let crash = ["sh", "-c", "ulimit -c unlimited && kill -ABRT $$"];
    let plain = Command::new(crash[0]).args(&crash[1..]).current_dir(folder.path()).status();
    if !plain.expect("sh can be started").core_dumped() {
        return aquifer_tests_support::skip("this machine writes no core dumps");
    }
    let cluster = Cluster::up(1, "64M");
    let output = cluster.run_command("16M", &crash).current_dir(folder.path()).output();
    let output = output.expect("aquifer can be started");
    assert_eq!(output.status.signal(), Some(Signal::ABORT.as_raw()));
    assert!(text(&output.stderr).contains("aquifer core PID"), "{}", text(&output.stderr));
}
