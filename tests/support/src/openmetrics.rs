//! Fetches metrics as a collector does, and reads the OpenMetrics text format strictly.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest time to wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A value of a metric.
#[derive(Clone, PartialEq, Debug)]
pub struct MetricSample {
    /// The name, with its suffix.
    pub name: String,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The value.
    pub value: f64,
}

/// All values of a text.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MetricSamples(pub Vec<MetricSample>);

impl MetricSamples {
    /// The values of a name that have all of these labels.
    pub fn of<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a MetricSample> {
        self.0.iter().filter(move |sample| {
            let has = |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|is| is == value);
            sample.name == name && labels.iter().all(has)
        })
    }

    /// The sum of the values of a name that have all of these labels; `None` if there are none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.of(name, labels).map(|sample| sample.value).reduce(|sum, value| sum + value)
    }
}

/// A family of metrics whose values are being read.
#[derive(Debug, Default)]
struct FamilyReader {
    name: String,
    kind: String,
    has_help: bool,
}

impl FamilyReader {
    fn suffixes(&self) -> Result<&'static [&'static str], String> {
        Ok(match self.kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "histogram" => &["_sum", "_count", "_bucket"],
            "info" => &["_info"],
            kind => return Err(format!("{} is a {kind}", self.name)),
        })
    }

    fn owns(&self, sample: &str) -> bool {
        let rest = sample.strip_prefix(&self.name);
        self.has_help && rest.is_some_and(|rest| self.suffixes().is_ok_and(|all| all.contains(&rest)))
    }
}

/// Reads a text.
///
/// # Errors
/// The first line that violates the format, and the reason.
pub fn parse(text: &str) -> Result<MetricSamples, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("the line # EOF is missing")?;
    let mut names = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let mut family = FamilyReader::default();
    let mut samples = MetricSamples::default();
    for line in body.lines() {
        let wrong = |why: &str| format!("{why}: {line}");
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let [Some(what), Some(name), Some(rest)] = [words.next(), words.next(), words.next()] else {
                return Err(wrong("an incomplete comment"));
            };
            match what {
                "HELP" if names.insert(name.to_owned()) => {
                    family =
                        FamilyReader { name: name.to_owned(), has_help: true, ..FamilyReader::default() };
                }
                "TYPE" if name == family.name => {
                    family.kind = rest.to_owned();
                    family.suffixes()?;
                }
                "UNIT" if name == family.name && name.ends_with(&format!("_{rest}")) => {}
                _ => return Err(wrong("a comment in the wrong place")),
            }
            continue;
        }
        let sample = parse_sample(line).map_err(|why| wrong(&why))?;
        if !family.owns(&sample.name) {
            return Err(wrong("a value outside its family"));
        }
        if !seen.insert((sample.name.clone(), sample.labels.clone())) {
            return Err(wrong("a repeated value"));
        }
        samples.0.push(sample);
    }
    check_histograms(&samples)?;
    Ok(samples)
}

fn parse_sample(line: &str) -> Result<MetricSample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    check_name(name)?;
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = parse_labels(inside, &mut labels)?;
    }
    let value = rest.strip_prefix(' ').ok_or("no blank before the value")?;
    Ok(MetricSample { name: name.to_owned(), labels, value: value.parse().map_err(|_| "not a number")? })
}

fn check_name(name: &str) -> Result<(), String> {
    let is_valid = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if is_valid { Ok(()) } else { Err(format!("{name} is not a name")) }
}

/// Reads labels up to the closing brace, and returns the text after it.
fn parse_labels<'a>(mut rest: &'a str, labels: &mut BTreeMap<String, String>) -> Result<&'a str, String> {
    loop {
        let (name, after) = rest.split_once("=\"").ok_or("a label without a value")?;
        check_name(name)?;
        let (value, after) = parse_value(after)?;
        if labels.insert(name.to_owned(), value).is_some() {
            return Err("a label twice".into());
        }
        if let Some(after) = after.strip_prefix('}') {
            return Ok(after);
        }
        rest = after.strip_prefix(',').ok_or("no comma between labels")?;
    }
}

fn parse_value(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => match characters.next() {
                Some((_, 'n')) => value.push('\n'),
                Some((_, escaped @ ('\\' | '"'))) => value.push(escaped),
                _ => return Err("an unknown escape".into()),
            },
            other => value.push(other),
        }
    }
    Err("a label without an end".into())
}

/// The name of a histogram and its labels.
type HistogramSeries = (String, BTreeMap<String, String>);

/// Checks that the buckets of each histogram increase, and that the last has all observations.
fn check_histograms(samples: &MetricSamples) -> Result<(), String> {
    let mut last: BTreeMap<HistogramSeries, (f64, f64)> = BTreeMap::new();
    for sample in &samples.0 {
        let Some(name) = sample.name.strip_suffix("_bucket") else { continue };
        let mut labels = sample.labels.clone();
        labels.remove("le");
        let bound = sample.labels.get("le").ok_or("a bucket without a bound")?.replace("+Inf", "inf");
        let bound: f64 = bound.parse().map_err(|_| "a bucket's bound is not a number")?;
        let before = last.insert((name.to_owned(), labels), (bound, sample.value));
        if before.is_some_and(|(below, count)| below >= bound || count > sample.value) {
            return Err(format!("buckets out of order: {sample:?}"));
        }
    }
    for ((name, labels), (bound, all)) in last {
        let labels: Vec<_> = labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        if bound != f64::INFINITY || samples.sum(&format!("{name}_count"), &labels) != Some(all) {
            return Err(format!("the last bucket of {name} does not have all observations"));
        }
    }
    Ok(())
}

/// The answer of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HttpAnswer {
    /// The status.
    pub status: u16,
    /// The header lines.
    pub head: String,
    /// The body.
    pub body: String,
}

/// Sends bytes to `address`, which is an address or `unix:PATH`, and reads the whole answer.
///
/// # Errors
/// An error of the system, or an answer that is not HTTP.
pub fn send_request(address: &str, request: &[u8]) -> io::Result<HttpAnswer> {
    match address.strip_prefix("unix:") {
        Some(path) => {
            let mut stream = UnixStream::connect(Path::new(path))?;
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            stream.write_all(request)?;
            read_answer(stream)
        }
        None => {
            let mut stream = TcpStream::connect(address)?;
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            stream.write_all(request)?;
            let answer = read_answer(&stream);
            let _gone = stream.shutdown(Shutdown::Both);
            answer
        }
    }
}

/// Reads an answer to its end.
///
/// # Errors
/// An error of the system, or an answer that is not HTTP.
pub fn read_answer(mut stream: impl Read) -> io::Result<HttpAnswer> {
    let mut bytes = Vec::new();
    let ended = stream.read_to_end(&mut bytes);
    // A server may answer and reset the connection before it has read the whole request.
    if bytes.is_empty() {
        ended?;
    }
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("no head"))?;
    let (status, head) = head.split_once("\r\n").unwrap_or((head, ""));
    let status = status.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("no status"))?;
    Ok(HttpAnswer { status, head: head.to_owned(), body: body.to_owned() })
}

/// Fetches the metrics of `address`, and reads them.
///
/// # Errors
/// A sentence that names the failure, or the line that violates the format.
pub fn scrape(address: &str) -> Result<MetricSamples, String> {
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n";
    let answer = send_request(address, request.as_bytes()).map_err(|error| format!("{address}: {error}"))?;
    if answer.status != 200 || !answer.head.contains("application/openmetrics-text") {
        return Err(format!("{address}: {answer:?}"));
    }
    parse(&answer.body)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# HELP a Help.\n# TYPE a counter\n";

    #[test]
    fn valid_texts_are_read() {
        let text = format!("{HEAD}a_total{{x=\"\\\"\\\\\\n,}}\",y=\"1\"}} 3\na_total 4\n# EOF\n");
        let samples = parse(&text).expect("the text is valid");
        assert_eq!(samples.0[0].labels["x"], "\"\\\n,}");
        assert_eq!(samples.sum("a_total", &[]), Some(7.0));
        assert_eq!(samples.sum("a_total", &[("y", "1")]), Some(3.0));
        assert_eq!(samples.sum("a_total", &[("y", "2")]), None);
    }

    #[test]
    fn invalid_texts_are_refused() {
        let head = |rest: &str| format!("{HEAD}{rest}# EOF\n");
        for text in [
            HEAD.to_owned(),
            head("a 1\n"),
            head("b_total 1\n"),
            head("a_total 1\na_total 2\n"),
            head("a_total{x=\"1} 1\n"),
            head("a_total{x=\"1\",x=\"2\"} 1\n"),
            head("a_total{x=\"\\x\"} 1\n"),
            head("a_total one\n"),
            head("\n"),
            head("# HELP a Again.\n"),
            head("# UNIT a bytes\n"),
            "a_total 1\n# EOF\n".to_owned(),
            "# HELP h H.\n# TYPE h histogram\nh_sum 1\nh_count 2\nh_bucket{le=\"1.0\"} 2\n# EOF\n".to_owned(),
            "# HELP h H.\n# TYPE h histogram\nh_sum 1\nh_count 2\nh_bucket{le=\"+Inf\"} 1\n# EOF\n"
                .to_owned(),
        ] {
            assert!(parse(&text).is_err(), "{text}");
        }
    }
}
