//! Files with options of memcached, such as `/etc/memcached.conf` of Debian.

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;

use clap::Parser;

use super::CacheArguments;
use crate::cli::{Cli, Command};

/// Parses the options of a file, followed by the arguments of this process.
///
/// # Errors
/// If the file cannot be read.
pub fn read(path: &Path) -> Result<CacheArguments, Box<dyn Error>> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("the file of --memcached-conf cannot be read: {error}"))?;
    let line = with_options(std::env::args_os(), &options(&text));
    match Cli::try_parse_from(line).unwrap_or_else(|error| error.exit()).command {
        Command::Cache(arguments) => Ok(*arguments),
        _ => Err("--memcached-conf is an option of `aquifer cache`".into()),
    }
}

/// The options in a file. As in Debian's service of memcached, `-d` and lines that are no options,
/// such as `logfile`, are ignored.
fn options(text: &str) -> Vec<&str> {
    let lines = text.lines().map(|line| line.split_once('#').map_or(line, |(before, _)| before).trim());
    let options = lines.filter(|line| line.starts_with('-') && !is_word(line, "-d") && !is_word(line, "-h"));
    options.flat_map(str::split_whitespace).collect()
}

fn is_word(line: &str, word: &str) -> bool {
    line.split_whitespace().next() == Some(word)
}

/// Inserts options after the word `cache` of a command line.
fn with_options(line: impl Iterator<Item = OsString>, options: &[&str]) -> Vec<OsString> {
    let mut line: Vec<OsString> = line.collect();
    // The command is the first word after the name that is neither an option nor the value of
    // --state.
    let is_value = |at: usize| line[at - 1] == "--state";
    let is_command = |at: &usize| !line[*at].to_string_lossy().starts_with('-') && !is_value(*at);
    let at = (1..line.len()).find(is_command).map_or(line.len(), |at| at + 1);
    line.splice(at..at, options.iter().map(OsString::from));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEBIAN: &str = "# memcached default config file\n\n-d\n\nlogfile /var/log/memcached.log\n# -v\n\
        -m 64 # MiB\n\n-p 11211\n-u memcache\n-l 127.0.0.1\n-l ::1\n\n# -c 1024\n\
        -P /var/run/memcached/memcached.pid\n";

    fn parse(line: &str) -> CacheArguments {
        let words = line.split_whitespace().map(OsString::from);
        match Cli::try_parse_from(with_options(words, &options(DEBIAN))).unwrap().command {
            Command::Cache(arguments) => *arguments,
            _ => panic!("another command"),
        }
    }

    #[test]
    fn the_file_of_debian_is_read() {
        let arguments = parse("aquifer --state cache cache --memcached-conf x");
        assert_eq!(
            (arguments.memory_limit, arguments.port, arguments.daemon),
            (64 << 20, Some(11211), false)
        );
        assert_eq!((arguments.listen.len(), arguments.user.as_deref()), (2, Some("memcache")));
        assert_eq!(arguments.pidfile.as_deref(), Some(Path::new("/var/run/memcached/memcached.pid")));
    }

    #[test]
    fn options_of_the_command_line_count_more() {
        let arguments = parse("aquifer cache -m 128 --memcached-conf x -p 7");
        assert_eq!((arguments.memory_limit, arguments.port), (128 << 20, Some(7)));
    }
}
