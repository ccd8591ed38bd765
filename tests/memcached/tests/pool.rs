//! Items that do not fit in the memory of the server, and are stored in the pool of a cluster.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output};
use std::time::Duration;

use aquifer_tests_e2e::eventually::eventually;
use aquifer_tests_e2e::{build, processes};
use aquifer_tests_memcached::cluster::LONG_PARTITION_TIMEOUT;
use aquifer_tests_memcached::{Options, Program, Server};

/// A client that sets and checks the values of numbered keys.
struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(server: &Server) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port())).expect("the server listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a socket has it");
        Self(BufReader::new(stream))
    }

    fn value(key: usize) -> String {
        format!("{key}:{}", "v".repeat(key % 700))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("the server answers");
        line
    }

    /// Stores keys in pipelines.
    fn set(&mut self, keys: std::ops::Range<usize>) {
        for start in keys.clone().step_by(100) {
            let batch = start..(start + 100).min(keys.end);
            let requests: String = batch
                .clone()
                .map(|key| {
                    let value = Self::value(key);
                    format!("set key{key} 0 0 {}\r\n{value}\r\n", value.len())
                })
                .collect();
            self.0.get_mut().write_all(requests.as_bytes()).expect("the server reads");
            for _ in batch {
                assert_eq!(self.line(), "STORED\r\n");
            }
        }
    }

    /// Reads keys, and returns how many are found. Those must have their values.
    fn count(&mut self, keys: impl Iterator<Item = usize>) -> usize {
        let mut found = 0;
        for key in keys {
            self.0.get_mut().write_all(format!("get key{key}\r\n").as_bytes()).expect("the server reads");
            let line = self.line();
            if line == "END\r\n" {
                continue;
            }
            let value = Self::value(key);
            assert_eq!(line, format!("VALUE key{key} 0 {}\r\n", value.len()));
            let mut rest = vec![0; value.len() + 7];
            self.0.read_exact(&mut rest).expect("the value follows");
            assert_eq!(String::from_utf8(rest).expect("text"), format!("{value}\r\nEND\r\n"));
            found += 1;
        }
        found
    }

    fn statistic(&mut self, name: &str) -> u64 {
        self.0.get_mut().write_all(b"stats\r\n").expect("the server reads");
        let mut found = 0;
        loop {
            let line = self.line();
            if line == "END\r\n" {
                return found;
            }
            if let Some(value) = line.strip_prefix(&format!("STAT {name} ")) {
                found = value.trim().parse().expect("a number");
            }
        }
    }
}

#[test]
fn items_overflow_into_the_memory_of_nodes_and_are_fetched() {
    let cluster = aquifer_tests_e2e::Cluster::up(1, "512M");
    let agent = cluster.agent_socket().display().to_string();
    let mut options = Options::new(Program::Aquifer).with(&["--pool", "256M", "--agent", &agent]);
    options.memory_mib = 16;
    let server = Server::start(options);
    let mut client = Client::connect(&server);
    let keys = 120_000;
    eventually("three times as many items as there is memory for", || {
        client.set(0..keys);
        (client.statistic("pool_items") > 30_000).then_some(())
    });
    // An item that the pool does not return in time is a miss, and may be found the next time.
    let asked = keys / 13;
    eventually("most items to be found", || {
        (client.count((0..keys).step_by(13).take(asked)) > asked / 2).then_some(())
    });
    assert!(client.statistic("pool_hits") > 1000);
    // The node ends: only its items are missing.
    processes::kill(cluster.daemon("node", Some(1)));
    let found = client.count((0..keys).step_by(17));
    assert!(found > 0, "the items in the memory of the server are found");
    client.set(0..100);
    assert_eq!(client.count(0..100), 100);
    drop(server);
}

/// The ports of servers 1 and 2, from the output of `aquifer cache status --json`, if both have a
/// share of the partitions. Servers are numbered as they join, which may differ from the order of
/// their starts.
fn shared_ports(output: &Output) -> Option<[u16; 2]> {
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    let [first, second] = &status["servers"].as_array()?[..] else { return None };
    let port = |server: &serde_json::Value| -> Option<u16> {
        let is_shared = output.status.success() && server["partitions"].as_array()?.len() > 40;
        let port = server["clients"][0].as_str()?.rsplit(':').next()?.parse().ok()?;
        is_shared.then_some(port)
    };
    Some([port(first)?, port(second)?])
}

#[test]
fn partitions_with_items_in_the_pool_move() {
    let cluster = aquifer_tests_e2e::Cluster::up(1, "512M");
    let state = cluster.state().display().to_string();
    let start = || {
        let of_cache = ["--directory", "embedded", "--state", &state];
        // The server uses the agent of the state folder.
        let options = Options::new(Program::Aquifer).with(&["--pool", "128M"]).with(&LONG_PARTITION_TIMEOUT);
        let mut options = options.with(&of_cache);
        options.memory_mib = 16;
        Server::start(options)
    };
    let operate = |arguments: &[&str]| {
        let mut command = Command::new(build::binary());
        command.arg("cache").args(arguments).args(["--directory", "embedded", "--state", &state]);
        command.output().expect("the binary can be started")
    };
    let servers = [start(), start()];
    let ports =
        eventually("the servers to share the partitions", || shared_ports(&operate(&["status", "--json"])));
    let server_at = |port| servers.iter().find(|server| server.port() == port).expect("one of both");
    let mut clients = ports.map(|port| Client::connect(server_at(port)));
    let keys = 100_000;
    // Servers that are slow to write to the pool drop items.
    eventually("both servers to have items in the pool", || {
        clients[0].set(0..keys);
        let in_pool = clients.each_mut().map(|client| client.statistic("pool_items"));
        in_pool.iter().all(|items| *items > 5000).then_some(())
    });
    // All partitions move to the second server, with the items in the memory of the first one.
    let drained = operate(&["drain", "1"]);
    assert!(drained.status.success(), "{drained:?}");
    let found = clients[0].count((0..keys).step_by(11));
    assert!(found > keys / 11 / 10, "{found}");
    eventually("the first server to have nothing in the pool", || {
        (clients[0].statistic("pool_bytes") == 0).then_some(())
    });
    // The partitions move back, and reads find the values that are set meanwhile.
    clients[1].set(0..keys / 2);
    assert!(operate(&["drain", "1", "--undo"]).status.success());
    let drained = operate(&["drain", "2"]);
    assert!(drained.status.success(), "{drained:?}");
    let found = clients[1].count((0..keys).step_by(11));
    assert!(found > keys / 11 / 10, "{found}");
    eventually("the second server to have nothing in the pool", || {
        (clients[1].statistic("pool_bytes") == 0).then_some(())
    });
}
