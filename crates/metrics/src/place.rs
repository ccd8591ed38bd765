//! Where figures are served.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// What a Unix socket's place begins with.
const UNIX: &str = "unix:";

/// An address that this machine alone can reach.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// A port of the loopback: whoever has an account here may ask.
    Tcp(SocketAddr),
    /// A Unix socket, for this user alone.
    Unix(PathBuf),
}

/// Why figures are not served somewhere.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlaceError {
    /// Other machines could ask.
    #[error(
        "{0} can be reached from other machines, and whoever asks for figures is not asked who he is: serve them at an address of this machine alone, such as 127.0.0.1:7480, or at unix:PATH, and let a scraper on this machine fetch them there, or a proxy that speaks TLS and knows who may ask"
    )]
    Open(SocketAddr),
    /// Daemons have no folder that they are in.
    #[error("{0} does not begin with /: say the whole path of the socket")]
    Relative(String),
    /// Nothing of the sort.
    #[error("\"{0}\" is neither an address of this machine, such as 127.0.0.1:7480, nor unix:PATH")]
    Unfit(String),
}

impl FromStr for Place {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Self, PlaceError> {
        if let Some(path) = text.strip_prefix(UNIX) {
            return match path.strip_prefix('/') {
                Some("") => Err(PlaceError::Unfit(text.to_owned())),
                Some(_) => Ok(Self::Unix(path.into())),
                None => Err(PlaceError::Relative(path.to_owned())),
            };
        }
        let address: SocketAddr = text.parse().map_err(|_| PlaceError::Unfit(text.to_owned()))?;
        if address.ip().is_loopback() { Ok(Self::Tcp(address)) } else { Err(PlaceError::Open(address)) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_this_machine_are_read_and_shown() {
        for text in ["127.0.0.1:7480", "127.9.8.7:0", "[::1]:80", "unix:/run/aquifer/node.metrics"] {
            let place: Place = text.parse().expect(text);
            assert_eq!(place.to_string(), text);
        }
    }

    #[test]
    fn what_others_can_reach_is_refused_with_a_way_out() {
        for text in ["0.0.0.0:7480", "10.0.0.7:7480", "[::]:7480", "[2001:db8::1]:1", "[::ffff:127.0.0.1]:1"]
        {
            let why = text.parse::<Place>().expect_err(text).to_string();
            assert!(why.contains("unix:PATH") && why.contains("TLS") && why.contains("127.0.0.1"), "{why}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in
            ["", "7480", "localhost:7480", "127.0.0.1", "127.0.0.1:70000", "unix:/", "http://127.0.0.1:1/"]
        {
            assert_eq!(text.parse::<Place>(), Err(PlaceError::Unfit(text.into())));
        }
        for path in ["", "metrics.sock", "./x"] {
            assert_eq!(format!("unix:{path}").parse::<Place>(), Err(PlaceError::Relative(path.into())));
        }
    }
}
