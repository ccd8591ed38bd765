//! Limit of log lines, so that a user cannot fill the disk with a daemon's log.
//!
//! Each *source* of lines has a token bucket. The source of a line is its user, if it has one in a
//! field, and otherwise its kind: the place in the code. Lines of the levels debug and trace are
//! not limited: they are written only if `RUST_LOG` asks for them.
//!
//! Crates for this purpose, such as `tracing-throttle`, limit lines that have the same values in
//! all fields but a list of exceptions. A user would choose a new value, such as a process number.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Lines of one source that are written without a pause.
const LINES_MAX: u32 = 100;
/// Time after which a source may write one more line: at most 9000 lines a day.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of sources with a bucket of their own. Further sources share one bucket.
const SOURCES_MAX: usize = 4096;
/// Longest line in bytes; texts in it may come from a user.
const LINE_BYTES_MAX: usize = 4096;
/// Fields that have the id of a user.
const USER_FIELDS: [&str; 3] = ["uid", "user", "tenant"];

/// The source of a log line.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Source {
    /// A user.
    User(u64),
    /// Lines of a place in the code that name no user.
    Kind(Identifier),
    /// All sources above [`SOURCES_MAX`].
    Others,
}

/// The token bucket of a source.
#[derive(Clone, Debug)]
struct Bucket {
    /// Lines that may be written now.
    lines: u32,
    /// The time when the last line was added to `lines`.
    filled_at: Instant,
    /// Number of lines that were left out since the last report.
    omitted: u64,
    /// Name of the last event that was left out: its place in the code.
    event: &'static str,
}

impl Bucket {
    fn new(now: Instant) -> Self {
        Self { lines: LINES_MAX, filled_at: now, omitted: 0, event: "" }
    }

    fn fill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.filled_at);
        let added = u32::try_from(elapsed.as_nanos() / LINE_INTERVAL.as_nanos()).unwrap_or(u32::MAX);
        self.lines = self.lines.saturating_add(added).min(LINES_MAX);
        self.filled_at = if self.lines == LINES_MAX { now } else { self.filled_at + LINE_INTERVAL * added };
    }
}

/// Lines of a source that were left out.
#[derive(PartialEq, Eq, Debug)]
struct Omitted {
    count: u64,
    /// The user; `None` if it is unknown.
    user: Option<u64>,
    /// Name of the last event that was left out.
    event: &'static str,
}

/// The buckets of all sources. Pure: time is an argument.
#[derive(Debug, Default)]
struct LineLimits {
    buckets: HashMap<Source, Bucket>,
    /// Sources with lines that were left out and not reported yet.
    unreported: Vec<Source>,
}

impl LineLimits {
    /// True if a line may be written.
    fn admit(&mut self, source: Source, event: &'static str, now: Instant) -> bool {
        let source = self.bounded(source, now);
        let bucket = self.buckets.entry(source.clone()).or_insert_with(|| Bucket::new(now));
        bucket.fill(now);
        if let Some(left) = bucket.lines.checked_sub(1) {
            bucket.lines = left;
            return true;
        }
        if bucket.omitted == 0 {
            self.unreported.push(source);
        }
        bucket.omitted += 1;
        bucket.event = event;
        false
    }

    /// The source, or [`Source::Others`] if there are too many.
    fn bounded(&mut self, source: Source, now: Instant) -> Source {
        if self.buckets.len() < SOURCES_MAX || self.buckets.contains_key(&source) {
            return source;
        }
        self.buckets.retain(|_, bucket| {
            bucket.fill(now);
            bucket.lines < LINES_MAX || bucket.omitted > 0
        });
        if self.buckets.len() < SOURCES_MAX { source } else { Source::Others }
    }

    /// Returns the omitted lines of sources that may write lines again. Each line is reported once.
    fn report(&mut self, now: Instant) -> Vec<Omitted> {
        let mut reported = Vec::new();
        let buckets = &mut self.buckets;
        self.unreported.retain(|source| {
            let Some(bucket) = buckets.get_mut(source) else { return false };
            bucket.fill(now);
            if bucket.lines == 0 {
                return true;
            }
            let user = if let Source::User(user) = source { Some(*user) } else { None };
            reported.push(Omitted { count: std::mem::take(&mut bucket.omitted), user, event: bucket.event });
            false
        });
        reported
    }
}

/// The id in a field of [`USER_FIELDS`].
#[derive(Default)]
struct UserVisitor(Option<u64>);

impl Visit for UserVisitor {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if USER_FIELDS.contains(&field.name()) {
            self.0 = Some(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}

fn source_of(event: &Event<'_>) -> Source {
    let mut user = UserVisitor::default();
    event.record(&mut user);
    user.0.map_or_else(|| Source::Kind(event.metadata().callsite()), Source::User)
}

/// Log format that omits lines above the limit of their source, and later writes their number.
#[derive(Debug)]
pub(crate) struct LimitedFormat<F> {
    format: F,
    limits: Mutex<LineLimits>,
}

impl<F> LimitedFormat<F> {
    /// Limits lines in this format.
    pub fn new(format: F) -> Self {
        Self { format, limits: Mutex::default() }
    }
}

impl<S, N, F> FormatEvent<S, N> for LimitedFormat<F>
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'fields> FormatFields<'fields> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata: &'static Metadata<'static> = event.metadata();
        let (omitted, is_admitted) = {
            let now = Instant::now();
            let mut limits = self.limits.lock();
            // A line of the levels debug and trace is admitted always.
            let is_limited = *metadata.level() <= Level::INFO;
            let omitted = limits.report(now);
            (omitted, !is_limited || limits.admit(source_of(event), metadata.name(), now))
        };
        for Omitted { count, user, event } in omitted {
            SystemTime.format_time(&mut writer)?;
            write!(writer, "  WARN aquifer::log_limit: left out log lines count={count} last={event:?}")?;
            user.map_or(Ok(()), |user| write!(writer, " user={user}"))?;
            writeln!(writer)?;
        }
        if !is_admitted {
            return Ok(());
        }
        let mut line = String::new();
        self.format.format_event(context, Writer::new(&mut line), event)?;
        if line.len() <= LINE_BYTES_MAX {
            return writer.write_str(&line);
        }
        line.truncate(line.floor_char_boundary(LINE_BYTES_MAX));
        writeln!(writer, "{line}…")
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    /// Number of lines of a source that are written in `seconds`, if it writes 10 a second.
    fn lines_in(limits: &mut LineLimits, source: &Source, start: Instant, seconds: u64) -> u32 {
        let line = |tenth| start + Duration::from_millis(tenth * 100);
        (0..seconds * 10).map(|tenth| u32::from(limits.admit(source.clone(), "flood", line(tenth)))).sum()
    }

    #[test]
    fn a_flood_is_bounded_and_all_lines_are_counted() {
        let start = Instant::now();
        let mut limits = LineLimits::default();
        let flood = Source::User(1000);
        let written = lines_in(&mut limits, &flood, start, 24 * 3600);
        assert!(written <= LINES_MAX + 24 * 360, "{written} lines in a day");
        assert!(limits.admit(Source::User(1001), "line", start), "another user is not limited");
        let end = start + Duration::from_secs(24 * 3600 + 10);
        let omitted = u64::from(24 * 36_000 - written);
        assert_eq!(limits.report(end), [Omitted { count: omitted, user: Some(1000), event: "flood" }]);
        assert_eq!(limits.report(end), [], "once");
        let later = end + LINE_INTERVAL * LINES_MAX;
        assert_eq!(lines_in(&mut limits, &flood, later, 1), 10, "it recovers");
    }

    #[test]
    fn nothing_is_reported_while_a_source_may_not_write() {
        let start = Instant::now();
        let mut limits = LineLimits::default();
        let source = Source::User(7);
        assert_eq!((0..=LINES_MAX).filter(|_| limits.admit(source.clone(), "a", start)).count(), 100);
        assert_eq!(limits.report(start), []);
        assert_eq!(limits.report(start + LINE_INTERVAL).len(), 1);
    }

    #[test]
    fn the_number_of_sources_is_bounded() {
        let start = Instant::now();
        let mut limits = LineLimits::default();
        let users = |from: u64| (from..from + 10_000).map(Source::User);
        let written = users(0).filter(|user| limits.admit(user.clone(), "a", start)).count();
        assert_eq!(written, SOURCES_MAX + 100, "the others share a bucket");
        assert!(limits.buckets.len() <= SOURCES_MAX + 1);
        // Sources that write no lines are removed.
        let later = start + LINE_INTERVAL * (LINES_MAX + 1);
        assert_eq!(limits.report(later).len(), 1);
        let written = users(20_000).filter(|user| limits.admit(user.clone(), "a", later)).count();
        assert!(written >= SOURCES_MAX, "{written}");
    }

    /// A log in memory.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Log {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    fn log_of(work: impl FnOnce()) -> String {
        let log = Log::default();
        let format = LimitedFormat::new(tracing_subscriber::fmt::format());
        let subscriber = tracing_subscriber::fmt().with_ansi(false).event_format(format);
        let subscriber = subscriber.with_max_level(Level::DEBUG).with_writer(log.clone()).finish();
        tracing::subscriber::with_default(subscriber, work);
        String::from_utf8(log.0.lock().clone()).unwrap()
    }

    #[test]
    fn lines_are_limited_by_user_or_kind() {
        let log = log_of(|| {
            for pid in 0..1000_u32 {
                tracing::warn!(uid = 1000_u32, pid, "refused a program");
                tracing::warn!(uid = 1000_u32, pid, "refused a session");
                tracing::info!(pid, error = %format!("error {pid}"), "an endpoint was refused");
                tracing::debug!(pid, "a debug line");
            }
            tracing::error!(uid = 2000_u32, "of another user");
        });
        let count = |text: &str| log.lines().filter(|line| line.contains(text)).count();
        // The test may take longer than the interval between two further lines.
        let is_near = |count, lines| (lines..lines + 20).contains(&count);
        assert!(is_near(count("uid=1000"), 100), "{}", count("uid=1000"));
        assert!(is_near(count("an endpoint was refused"), 100));
        assert_eq!(count("a debug line"), 1000);
        assert_eq!(count("of another user uid=2000"), 1);
    }

    #[test]
    fn a_long_line_is_cut() {
        let log = log_of(|| tracing::warn!(text = "ü".repeat(10_000), "long"));
        assert!(log.len() <= LINE_BYTES_MAX + 8 && log.ends_with("…\n"), "{} bytes", log.len());
        assert_eq!(log.lines().count(), 1);
    }
}
