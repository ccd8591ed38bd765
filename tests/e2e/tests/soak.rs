//! Random programs with random limits, for `AQUIFER_SOAK_S` seconds; without the variable, once.

use std::time::{Duration, Instant};

use aquifer_tests_e2e::run::{Running, run_plainly};
use aquifer_tests_e2e::{Cluster, build};

const SECONDS_VARIABLE: &str = "AQUIFER_SOAK_S";
const SEED_VARIABLE: &str = "AQUIFER_SEED";
const TESTS: [&str; 8] = ["pages", "mremap", "madvise", "remap", "fork", "threads", "protect", "brk"];

/// Numbers that a seed determines (SplitMix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (number ^ number >> 31) % bound
    }
}

fn round(cluster: &Cluster, numbers: &mut Numbers) {
    let checker = build::programs().join("checker");
    let test = TESTS[usize::try_from(numbers.below(TESTS.len() as u64)).expect("small")];
    let bytes = (32 + numbers.below(64)) << 20;
    let limit = bytes / (2 + numbers.below(5)) + (8 << 20);
    let (bytes, threads) = (bytes.to_string(), (1 + numbers.below(8)).to_string());
    let seed = numbers.below(1 << 32).to_string();
    let program = [
        checker.to_str().expect("a plain path"),
        test,
        "--bytes",
        &bytes,
        "--threads",
        &threads,
        "--seed",
        &seed,
    ];
    println!("{program:?} within {limit} bytes");
    let forks = test == "fork";
    let plain = run_plainly(&program, forks);
    let mut command = cluster.run_command(&limit.to_string(), &program);
    let paged = Running::start(&mut command, forks, Box::new(|| 0)).wait();
    paged.assert_success(test);
    assert_eq!(paged.stdout, plain.stdout, "{program:?}");
    cluster.assert_all_free();
}

mod long {
    use super::*;

    #[test]
    fn random_programs_under_random_limits() {
        let number =
            |variable: &str| std::env::var(variable).ok().map(|text| text.parse().expect("a number"));
        let time = Duration::from_secs(number(SECONDS_VARIABLE).unwrap_or(0));
        let seed = number(SEED_VARIABLE).unwrap_or(1);
        println!("again with {SEED_VARIABLE}={seed}");
        let mut numbers = Numbers(seed);
        let cluster = Cluster::up(3, "256M");
        let started = Instant::now();
        loop {
            round(&cluster, &mut numbers);
            if started.elapsed() >= time {
                return;
            }
        }
    }
}
