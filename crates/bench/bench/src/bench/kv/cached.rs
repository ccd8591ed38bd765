//! A client for memcached's text protocol.

use std::io::{self, BufRead, BufReader, Error, ErrorKind, Read, Write};

/// Longest line of the protocol; values are not lines.
const LINE_BYTES_MAX: u64 = 512;
/// Longest value.
const VALUE_BYTES_MAX: usize = 1 << 20;

/// A connection.
#[derive(Debug)]
pub struct Memcached<S: Read + Write> {
    stream: BufReader<S>,
    request: Vec<u8>,
    line: Vec<u8>,
    value: Vec<u8>,
}

impl<S: Read + Write> Memcached<S> {
    /// A client of the server at the other end of a stream.
    pub fn over(stream: S) -> Self {
        let stream = BufReader::with_capacity(1 << 16, stream);
        Self { stream, request: Vec::new(), line: Vec::new(), value: Vec::new() }
    }

    /// Sets the value of a key.
    ///
    /// # Errors
    /// If the connection breaks, or the server refuses.
    pub fn set(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.request.clear();
        self.request.extend_from_slice(b"set ");
        self.request.extend_from_slice(key);
        self.request.extend_from_slice(format!(" 0 0 {}\r\n", value.len()).as_bytes());
        self.request.extend_from_slice(value);
        self.request.extend_from_slice(b"\r\n");
        self.send()?;
        match self.read_line()? {
            b"STORED" => Ok(()),
            other => Err(invalid(other)),
        }
    }

    /// Reads the values of keys, in their order; keys without a value are left out.
    ///
    /// # Errors
    /// If the connection breaks, or the answer is not valid.
    pub fn get(&mut self, keys: &[&[u8]], found: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()> {
        self.request.clear();
        self.request.extend_from_slice(b"get");
        for key in keys {
            self.request.push(b' ');
            self.request.extend_from_slice(key);
        }
        self.request.extend_from_slice(b"\r\n");
        self.send()?;
        loop {
            let line = self.read_line()?;
            if line == b"END" {
                return Ok(());
            }
            let text = String::from_utf8_lossy(line).into_owned();
            let words: Vec<&str> = text.split(' ').collect();
            let ["VALUE", key, _, bytes] = words[..] else { return Err(invalid(text.as_bytes())) };
            let bytes = bytes.parse().ok().filter(|bytes| *bytes <= VALUE_BYTES_MAX);
            let bytes = bytes.ok_or_else(|| invalid(text.as_bytes()))?;
            self.value.resize(bytes + 2, 0);
            self.stream.read_exact(&mut self.value)?;
            found(key.as_bytes(), &self.value[..bytes]);
        }
    }

    fn send(&mut self) -> io::Result<()> {
        let stream = self.stream.get_mut();
        stream.write_all(&self.request)?;
        stream.flush()
    }

    fn read_line(&mut self) -> io::Result<&[u8]> {
        self.line.clear();
        (&mut self.stream).take(LINE_BYTES_MAX).read_until(b'\n', &mut self.line)?;
        self.line.strip_suffix(b"\r\n").ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))
    }
}

fn invalid(line: &[u8]) -> Error {
    Error::new(ErrorKind::InvalidData, format!("an unexpected answer: {:?}", String::from_utf8_lossy(line)))
}
