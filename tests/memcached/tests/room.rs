//! Items that need the room of others.

use std::thread;

use crate::start_aquifer;

const SHORT_ITEMS: u32 = 600_000;
const WRITERS: usize = 20;
const LONG_ITEMS: u32 = 20;
const LONG_BYTES: usize = 500_000;

#[test]
fn long_items_find_room_among_short_ones() {
    let server = start_aquifer(&[]);
    let mut connection = server.connect();
    for batch in (0..SHORT_ITEMS).step_by(1000) {
        let mut requests = String::new();
        for number in batch..batch + 1000 {
            requests += &format!("set short-{number} 0 0 200 noreply\r\n{}\r\n", "s".repeat(200));
        }
        connection.send(requests.as_bytes());
        assert_eq!(connection.request("mn\r\n"), b"MN\r\n");
    }
    let value = vec![b'l'; LONG_BYTES];
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (server, value) = (&server, &value);
            scope.spawn(move || {
                let mut connection = server.connect();
                for number in 0..LONG_ITEMS {
                    let key = format!("long-{writer}-{number}");
                    let line = format!("set {key} 0 0 {LONG_BYTES}\r\n");
                    let request = [line.as_bytes(), value, b"\r\n"].concat();
                    assert_eq!(connection.request(request), b"STORED\r\n");
                    let found = connection.request(format!("get {key}\r\n"));
                    // Another writer may have needed the room meanwhile.
                    assert!(found == b"END\r\n" || found.len() > LONG_BYTES, "{}", found.len());
                }
            });
        }
    });
    assert_eq!(connection.request("set short 0 0 1\r\ns\r\n"), b"STORED\r\n");
    let resident = server.resident_bytes();
    assert!(resident < 160 << 20, "{resident} bytes with a limit of 64 MiB");
}
