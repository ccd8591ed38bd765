//! Attacks on the control memory, which a program shares with the agent.

use std::io::Read;

use aquifer_ipc::control::{CONTROL_BYTES, WORKER_IS_LAST};

use crate::sys::{self, PAGE};

/// How often the control memory of a program that evicts pages is overwritten.
const ROUNDS: usize = 500;
/// Size of the memory of such a program. It must be more than the limit of its run.
const CHILD_BYTES: usize = 48 << 20;

/// Overwrites the control memory of forked children, which evict pages meanwhile and are then
/// killed, and last the own control memory. The second argument names the bytes to write.
pub fn overwrite() -> bool {
    let bytes = contents();
    for keeps_word in [true, false] {
        let child = sys::fork(|| {
            if !keeps_word {
                sys::clear_no_word();
            }
            let first = sys::reserve(CHILD_BYTES);
            loop {
                (0..CHILD_BYTES).step_by(PAGE).for_each(|offset| sys::touch(first + offset));
            }
        });
        for _ in 0..ROUNDS {
            // A child has no control memory before it is attached.
            if let Some(address) = control_address(child) {
                sys::write_memory(child, address, &bytes);
            }
        }
        sys::kill(child);
        sys::wait(child);
    }
    overwrite_own(&bytes)
}

/// Overwrites the own control memory, reports it, and waits for the end of standard input.
pub fn overwrite_and_wait() -> bool {
    let is_overwritten = overwrite_own(&contents());
    println!("sent");
    let _end = std::io::stdin().read(&mut [0]);
    is_overwritten
}

fn overwrite_own(bytes: &[u8]) -> bool {
    let own = i32::try_from(std::process::id()).expect("a process number");
    control_address(own).is_some_and(|address| sys::write_memory(own, address, bytes))
}

/// The bytes that the second argument names.
fn contents() -> Vec<u8> {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut word = |name: &str| match name {
        "zeros" => 0,
        "ones" => u32::MAX,
        // The value by which a worker marks that it has reported to be the last process.
        "last" => WORKER_IS_LAST,
        "random" => {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 32) as u32
        }
        _ => panic!("there are no contents {name}"),
    };
    let name = std::env::args().nth(2).expect("the name of the contents");
    (0..CONTROL_BYTES / 4).flat_map(|_| word(&name).to_le_bytes()).collect()
}

/// The address of the control memory of a process.
fn control_address(process: i32) -> Option<usize> {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    let line = maps.lines().find(|line| line.contains("/memfd:aquifer-control"))?;
    usize::from_str_radix(line.split('-').next()?, 16).ok()
}
