//! Addresses of etcd: `etcd://HOST:PORT[,HOST:PORT…][/CLUSTER]`, or `etcds://…` for TLS.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The name of the cluster in an address without one.
const CLUSTER: &str = "default";
const CLUSTER_BYTES_MAX: usize = 64;
/// Most members of an address. etcd recommends at most seven.
const MEMBERS_MAX: usize = 16;

/// The address of an etcd, and the name of this cluster's keys in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EtcdAddress {
    /// Whether connections use TLS.
    pub uses_tls: bool,
    /// `HOST:PORT` of each known member, at least one.
    pub members: Vec<String>,
    /// The name that separates this cluster's keys from other keys in the etcd.
    pub cluster: String,
}

/// Files for TLS, all in PEM format.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TlsFiles {
    /// Certificates of the authorities that signed the certificates of the members.
    pub ca: Option<PathBuf>,
    /// The client's certificate.
    pub certificate: Option<PathBuf>,
    /// The key of the client's certificate.
    pub key: Option<PathBuf>,
}

/// A text that is not an address of an etcd.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("\"{text}\" is not an address of an etcd: {why}; write etcd://HOST:PORT[,HOST:PORT...][/CLUSTER]")]
pub struct AddressError {
    text: String,
    why: InvalidPart,
}

/// The part of an address that is not valid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
enum InvalidPart {
    #[error("it does not begin with etcd:// or etcds://")]
    Scheme,
    #[error("it has {0} members, more than {MEMBERS_MAX}")]
    MemberCount(usize),
    #[error("\"{0}\" has no port")]
    NoPort(String),
    #[error("\"{0}\" is not a port")]
    Port(String),
    #[error("\"{0}\" is not a host")]
    Host(String),
    #[error("a cluster's name has 1 to {CLUSTER_BYTES_MAX} characters of a-z, A-Z, 0-9, '.', '-' and '_'")]
    Cluster,
}

impl FromStr for EtcdAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        parse(text).map_err(|why| AddressError { text: text.to_owned(), why })
    }
}

impl fmt::Display for EtcdAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.uses_tls { "etcds" } else { "etcd" };
        write!(f, "{scheme}://{}", self.members.join(","))?;
        if self.cluster == CLUSTER { Ok(()) } else { write!(f, "/{}", self.cluster) }
    }
}

fn parse(text: &str) -> Result<EtcdAddress, InvalidPart> {
    let (uses_tls, rest) = match (text.strip_prefix("etcd://"), text.strip_prefix("etcds://")) {
        (Some(rest), _) => (false, rest),
        (_, Some(rest)) => (true, rest),
        _ => return Err(InvalidPart::Scheme),
    };
    let (members, cluster) = rest.split_once('/').unwrap_or((rest, CLUSTER));
    let members: Vec<String> = members.split(',').map(str::to_owned).collect();
    if members.len() > MEMBERS_MAX {
        return Err(InvalidPart::MemberCount(members.len()));
    }
    for member in &members {
        check_member(member)?;
    }
    check_cluster(cluster)?;
    Ok(EtcdAddress { uses_tls, members, cluster: cluster.to_owned() })
}

fn check_member(member: &str) -> Result<(), InvalidPart> {
    let (host, port) = member.rsplit_once(':').ok_or_else(|| InvalidPart::NoPort(member.to_owned()))?;
    // `parse` alone would accept a sign.
    let is_port =
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    if !is_port {
        return Err(InvalidPart::Port(port.to_owned()));
    }
    let is_v6 = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok());
    let is_name =
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    if is_v6 || is_name { Ok(()) } else { Err(InvalidPart::Host(host.to_owned())) }
}

fn check_cluster(cluster: &str) -> Result<(), InvalidPart> {
    let is_plain = cluster.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    if cluster.is_empty() || cluster.len() > CLUSTER_BYTES_MAX || !is_plain {
        return Err(InvalidPart::Cluster);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_are_parsed_and_displayed() {
        for text in [
            "etcd://127.0.0.1:2379",
            "etcd://a.example:2379,b-2:1/x_1",
            "etcds://[::1]:65535/c",
            "etcd://h:2379,h:2380,h:2381",
        ] {
            assert_eq!(text.parse::<EtcdAddress>().unwrap().to_string(), text);
        }
        let named = "etcd://h:1/default".parse::<EtcdAddress>().unwrap();
        assert_eq!(named, "etcd://h:1".parse().unwrap());
        assert!("etcds://h:1".parse::<EtcdAddress>().unwrap().uses_tls);
    }

    #[test]
    fn an_invalid_address_is_refused_with_a_reason() {
        let many = format!("etcd://{}", vec!["h:1"; MEMBERS_MAX + 1].join(","));
        for (text, why) in [
            ("", "does not begin"),
            ("http://h:1", "does not begin"),
            ("etcd://", "no port"),
            ("etcd://h", "no port"),
            ("etcd://h:", "not a port"),
            ("etcd://h:0", "not a port"),
            ("etcd://h:+1", "not a port"),
            ("etcd://h:65536", "not a port"),
            ("etcd://:1", "not a host"),
            ("etcd://h:1,", "no port"),
            ("etcd://u@h:1", "not a host"),
            ("etcd://::1:1", "not a host"),
            ("etcd://h:1/", "a cluster's name"),
            ("etcd://h:1/a/b", "a cluster's name"),
            (many.as_str(), "17 members"),
        ] {
            let error = text.parse::<EtcdAddress>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_comes_back(text in "(etcds?://)?[a-z0-9:,./\\[\\]@ -]{0,40}") {
            if let Ok(address) = text.parse::<EtcdAddress>() {
                prop_assert_eq!(address.to_string().parse::<EtcdAddress>().unwrap(), address);
            }
        }
    }
}
