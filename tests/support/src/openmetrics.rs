//! Reads the text that Prometheus reads, as strictly as its format is defined, and fetches it as a scraper does.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A server that says nothing for so long is broken.
const PATIENCE: Duration = Duration::from_secs(30);

/// One figure.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// Its name, with its suffix.
    pub name: String,
    /// What tells it apart from others of the name.
    pub labels: BTreeMap<String, String>,
    /// The figure.
    pub value: f64,
}

/// All figures of a text.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Samples(pub Vec<Sample>);

impl Samples {
    /// The figures of a name that have all of these labels.
    pub fn of<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.0.iter().filter(move |sample| {
            let has = |(key, value): &(&str, &str)| sample.labels.get(*key).is_some_and(|is| is == value);
            sample.name == name && labels.iter().all(has)
        })
    }

    /// Their sum; `None` if there are none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.of(name, labels).map(|sample| sample.value).reduce(|sum, value| sum + value)
    }
}

/// A family while its rows are read.
#[derive(Debug, Default)]
struct Family {
    name: String,
    kind: String,
    has_help: bool,
}

impl Family {
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

/// Read a text.
///
/// # Errors
/// The first line that breaks the format, and why.
pub fn parse(text: &str) -> Result<Samples, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("the end is missing")?;
    let mut names = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let mut family = Family::default();
    let mut samples = Samples::default();
    for line in body.lines() {
        let wrong = |why: &str| format!("{why}: {line}");
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let [Some(what), Some(name), Some(rest)] = [words.next(), words.next(), words.next()] else {
                return Err(wrong("half a comment"));
            };
            match what {
                "HELP" if names.insert(name.to_owned()) => {
                    family = Family { name: name.to_owned(), has_help: true, ..Family::default() };
                }
                "TYPE" if name == family.name => {
                    family.kind = rest.to_owned();
                    family.suffixes()?;
                }
                "UNIT" if name == family.name && name.ends_with(&format!("_{rest}")) => {}
                _ => return Err(wrong("a comment out of place")),
            }
            continue;
        }
        let sample = parse_sample(line).map_err(|why| wrong(&why))?;
        if !family.owns(&sample.name) {
            return Err(wrong("a figure outside its family"));
        }
        if !seen.insert((sample.name.clone(), sample.labels.clone())) {
            return Err(wrong("a figure twice"));
        }
        samples.0.push(sample);
    }
    check_histograms(&samples)?;
    Ok(samples)
}

fn parse_sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    check_name(name)?;
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = parse_labels(inside, &mut labels)?;
    }
    let value = rest.strip_prefix(' ').ok_or("no blank before the value")?;
    Ok(Sample { name: name.to_owned(), labels, value: value.parse().map_err(|_| "no number")? })
}

fn check_name(name: &str) -> Result<(), String> {
    let is_fit = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if is_fit { Ok(()) } else { Err(format!("{name} is no name")) }
}

/// Read labels up to the brace; what follows it.
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

/// A histogram's name, and what tells it apart from others of the name.
type Series = (String, BTreeMap<String, String>);

/// Each histogram's buckets grow, and the last has all.
fn check_histograms(samples: &Samples) -> Result<(), String> {
    let mut last: BTreeMap<Series, (f64, f64)> = BTreeMap::new();
    for sample in &samples.0 {
        let Some(name) = sample.name.strip_suffix("_bucket") else { continue };
        let mut labels = sample.labels.clone();
        labels.remove("le");
        let bound = sample.labels.get("le").ok_or("a bucket without a bound")?.replace("+Inf", "inf");
        let bound: f64 = bound.parse().map_err(|_| "a bucket's bound is no number")?;
        let before = last.insert((name.to_owned(), labels), (bound, sample.value));
        if before.is_some_and(|(below, count)| below >= bound || count > sample.value) {
            return Err(format!("buckets out of order: {sample:?}"));
        }
    }
    for ((name, labels), (bound, all)) in last {
        let labels: Vec<_> = labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        if bound != f64::INFINITY || samples.sum(&format!("{name}_count"), &labels) != Some(all) {
            return Err(format!("the last bucket of {name} has not all"));
        }
    }
    Ok(())
}

/// What a server answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The head, without its status.
    pub head: String,
    /// What follows it.
    pub body: String,
}

/// Say these bytes to `place`, an address or `unix:PATH`, and hear the answer to its end.
///
/// # Errors
/// The system's; what is no answer.
pub fn ask(place: &str, request: &[u8]) -> io::Result<Answer> {
    match place.strip_prefix("unix:") {
        Some(path) => {
            let mut stream = UnixStream::connect(Path::new(path))?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(request)?;
            hear(stream)
        }
        None => {
            let mut stream = TcpStream::connect(place)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(request)?;
            let told = hear(&stream);
            let _gone = stream.shutdown(Shutdown::Both);
            told
        }
    }
}

/// Hear an answer to its end.
///
/// # Errors
/// The system's; what is no answer.
pub fn hear(mut stream: impl Read) -> io::Result<Answer> {
    let mut bytes = Vec::new();
    let ended = stream.read_to_end(&mut bytes);
    // Whoever is refused in the middle of a request is cut off, having been told why.
    if bytes.is_empty() {
        ended?;
    }
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("no head"))?;
    let (status, head) = head.split_once("\r\n").unwrap_or((head, ""));
    let status = status.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
    let status = status.ok_or_else(|| io::Error::other("no status"))?;
    Ok(Answer { status, head: head.to_owned(), body: body.to_owned() })
}

/// Fetch the figures of `place`, and read them.
///
/// # Errors
/// What is wrong with them.
pub fn scrape(place: &str) -> Result<Samples, String> {
    let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let answer = ask(place, request).map_err(|error| format!("{place}: {error}"))?;
    if answer.status != 200 || !answer.head.contains("application/openmetrics-text") {
        return Err(format!("{place}: {answer:?}"));
    }
    parse(&answer.body)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "# HELP a Help.\n# TYPE a counter\n";

    #[test]
    fn what_is_right_is_read() {
        let text = format!("{HEAD}a_total{{x=\"\\\"\\\\\\n,}}\",y=\"1\"}} 3\na_total 4\n# EOF\n");
        let samples = parse(&text).expect("it is right");
        assert_eq!(samples.0[0].labels["x"], "\"\\\n,}");
        assert_eq!(samples.sum("a_total", &[]), Some(7.0));
        assert_eq!(samples.sum("a_total", &[("y", "1")]), Some(3.0));
        assert_eq!(samples.sum("a_total", &[("y", "2")]), None);
    }

    #[test]
    fn what_is_wrong_is_found() {
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
