//! Traces of allocations.
//!
//! A line `MICROSECONDS SIZE_CLASS` is the time at which an extent of 4 KiB · 2^class is requested.
//! Blank lines, and text after `#`, are ignored.

use std::collections::VecDeque;
use std::path::Path;

use aquifer_pool::SizeClass;

use crate::BenchError;

/// Most allocations in a trace.
pub const ARRIVALS_MAX: usize = 1_000_000;
/// Latest time: an hour.
const AT_US_MAX: u64 = 3_600_000_000;

/// A requested allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Time since the start of the trace in ns.
    pub at_ns: u64,
    /// Size class of the extent.
    pub class: SizeClass,
}

/// The next operation of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AllocRequest {
    /// Allocate an extent.
    Allocate(SizeClass),
    /// Free any extent.
    FreeAny,
    /// Free the oldest extent.
    FreeOldest,
}

impl AllocRequest {
    /// Whether the request is an allocation.
    pub fn is_allocation(self) -> bool {
        matches!(self, Self::Allocate(_))
    }
}

/// Reads a trace.
///
/// # Errors
/// If the file cannot be read, or a line is not valid.
pub fn read(path: &Path) -> Result<Vec<Arrival>, BenchError> {
    let text = std::fs::read_to_string(path).map_err(BenchError::io("read the trace", path))?;
    parse(&text).map_err(|reason| BenchError::Trace { path: path.to_owned(), reason })
}

/// Parses the text of a trace.
///
/// # Errors
/// A message with the number of the line.
pub fn parse(text: &str) -> Result<Vec<Arrival>, String> {
    let mut arrivals: Vec<Arrival> = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let said = line.split_once('#').map_or(line, |(said, _)| said).trim();
        if said.is_empty() {
            continue;
        }
        let arrival = parse_line(said).map_err(|reason| format!("line {number}: {reason}"))?;
        if arrivals.last().is_some_and(|last| last.at_ns > arrival.at_ns) {
            return Err(format!(
                "line {number}: \"{said}\" is before the line above it; sort the lines by time"
            ));
        }
        if arrivals.len() == ARRIVALS_MAX {
            return Err(format!("line {number}: a trace has at most {ARRIVALS_MAX} allocations"));
        }
        arrivals.push(arrival);
    }
    if arrivals.is_empty() {
        return Err("there is no allocation in the trace".into());
    }
    Ok(arrivals)
}

fn parse_line(said: &str) -> Result<Arrival, String> {
    let wrong = || {
        format!(
            "\"{said}\" is not MICROSECONDS SIZE_CLASS, such as \"1250 3\": whole numbers, the class 0 (4 \
                KiB) to 9 (2 MiB)"
        )
    };
    let mut words = said.split_ascii_whitespace();
    let (Some(at), Some(class), None) = (words.next(), words.next(), words.next()) else {
        return Err(wrong());
    };
    let number = |word: &str| {
        word.bytes().all(|byte| byte.is_ascii_digit()).then(|| word.parse::<u64>().ok()).flatten()
    };
    let at_us = number(at).ok_or_else(wrong)?;
    if at_us > AT_US_MAX {
        return Err(format!("{at_us} µs is later than an hour"));
    }
    let class = number(class).and_then(|k| SizeClass::new(u8::try_from(k).ok()?)).ok_or_else(wrong)?;
    Ok(Arrival { at_ns: at_us * 1000, class })
}

/// A client's part of a trace. The clients take the arrivals in turn. A client that holds its share
/// of the memory frees its oldest extent first.
#[derive(Clone, Debug)]
pub struct Replay<'a> {
    arrivals: &'a [Arrival],
    next: usize,
    step: usize,
    share_bytes: u64,
    held: VecDeque<SizeClass>,
    held_bytes: u64,
}

impl<'a> Replay<'a> {
    /// The part of the client with this number.
    pub fn new(arrivals: &'a [Arrival], number: usize, clients: usize, share_bytes: u64) -> Self {
        Self { arrivals, next: number, step: clients, share_bytes, held: VecDeque::new(), held_bytes: 0 }
    }

    /// The next request, and its time.
    pub fn next(&self, now_ns: u64) -> Option<(AllocRequest, u64)> {
        let arrival = self.arrivals.get(self.next)?;
        let is_full = !self.held.is_empty() && self.held_bytes + arrival.class.bytes() > self.share_bytes;
        Some(if is_full {
            (AllocRequest::FreeOldest, now_ns)
        } else {
            (AllocRequest::Allocate(arrival.class), arrival.at_ns)
        })
    }

    /// Records that the next request has started.
    pub fn begun(&mut self, request: AllocRequest) {
        if let AllocRequest::Allocate(class) = request {
            self.next += self.step;
            self.held.push_back(class);
            self.held_bytes += class.bytes();
        } else if let Some(oldest) = self.held.pop_front() {
            self.held_bytes -= oldest.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_malformed_line_is_reported_with_its_number() {
        for (text, line, word) in [
            ("5", 1, "MICROSECONDS"),
            ("1 1\n\n# x\n2 10", 4, "2 10"),
            ("1 1 1", 1, "1 1 1"),
            ("-1 0", 1, "-1 0"),
            ("+1 0", 1, "+1 0"),
            ("1.5 0", 1, "1.5 0"),
            ("1 256", 1, "1 256"),
            ("99999999999999999999 0", 1, "MICROSECONDS"),
            ("3600000001 0", 1, "hour"),
            ("5 0\n4 0", 2, "sort"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(&format!("line {line}:")) && error.contains(word), "{text:?}: {error}");
        }
        assert!(parse("# nothing\n \n").unwrap_err().contains("no allocation"));
    }

    #[test]
    fn the_limit_is_reported_at_the_line_after_it() {
        let mut text = "0 0\n".repeat(ARRIVALS_MAX);
        assert_eq!(parse(&text).unwrap().len(), ARRIVALS_MAX);
        text += "\n0 0\n";
        assert!(parse(&text).unwrap_err().contains(&format!("line {}:", ARRIVALS_MAX + 2)));
    }

    #[test]
    fn a_missing_file_is_named() {
        assert!(read(Path::new("/nowhere/x.trace")).unwrap_err().to_string().contains("/nowhere/x.trace"));
    }

    #[test]
    fn the_sample_is_a_trace() {
        let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../bench/alloc/sample.trace");
        let arrivals = read(&sample).unwrap();
        assert!(arrivals.len() >= 1000);
        assert!((0..SizeClass::COUNT).all(|k| arrivals.iter().any(|arrival| arrival.class.k() == k)));
    }

    #[test]
    fn clients_take_turns_and_none_has_more_than_its_share() {
        let arrivals: Vec<Arrival> =
            (0..100).map(|at_ns| Arrival { at_ns, class: SizeClass::CHUNK }).collect();
        let mut seen = Vec::new();
        for number in 0..3 {
            let mut replay = Replay::new(&arrivals, number, 3, 4 * 4096);
            while let Some((request, at_ns)) = replay.next(u64::MAX) {
                replay.begun(request);
                assert!(replay.held_bytes <= 4 * 4096 && replay.held.len() <= 4);
                if request.is_allocation() {
                    seen.push(at_ns);
                }
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..100).collect::<Vec<u64>>());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[0-9 #\\n\\t.a-]{0,200}") {
            let lines = text.lines().filter(|line| !line.split('#').next().unwrap_or("").trim().is_empty());
            if let Ok(arrivals) = parse(&text) {
                prop_assert_eq!(arrivals.len(), lines.count());
            }
        }

        #[test]
        fn a_written_trace_is_parsed(
            mut times in prop::collection::vec(0..AT_US_MAX, 1..50),
            k in 0..SizeClass::COUNT,
            noise in "[ \\t]{0,3}",
        ) {
            times.sort_unstable();
            let text: String = times.iter().map(|at| format!("{noise}{at} \t{k}{noise}# 7 7\n\n")).collect();
            let arrivals = parse(&text).unwrap();
            let pair = |arrival: &Arrival| (arrival.at_ns / 1000, arrival.class.k());
            let read: Vec<(u64, u8)> = arrivals.iter().map(pair).collect();
            let written: Vec<(u64, u8)> = times.into_iter().map(|at| (at, k)).collect();
            prop_assert_eq!(read, written);
        }
    }
}
