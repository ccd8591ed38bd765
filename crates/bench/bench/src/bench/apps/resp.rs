//! A client for SET and GET with redis's protocol RESP, with pipelined commands.

use std::io::{self, BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Longest time to wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest line of the protocol; values are not lines.
const LINE_BYTES_MAX: u64 = 512;
/// Longest value.
const VALUE_BYTES_MAX: usize = 1 << 20;

/// A connection.
#[derive(Debug)]
pub struct Client<S: Read + Write = UnixStream> {
    stream: BufReader<S>,
    request: Vec<u8>,
    line: Vec<u8>,
}

/// An answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// The command succeeded.
    Done,
    /// A value, which is in the buffer.
    Value,
    /// There is no such key.
    Nothing,
}

impl Client {
    /// Connects to a server's Unix socket.
    ///
    /// # Errors
    /// If no server listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        Ok(Self::over(stream))
    }
}

impl<S: Read + Write> Client<S> {
    /// A client of the server at the other end of a stream.
    pub fn over(stream: S) -> Self {
        Self { stream: BufReader::with_capacity(1 << 16, stream), request: Vec::new(), line: Vec::new() }
    }

    /// Queues a command.
    pub fn add(&mut self, words: &[&[u8]]) {
        let vector = &mut self.request;
        // Writing to a vector cannot fail.
        let _ = write!(vector, "*{}\r\n", words.len());
        for word in words {
            let _ = write!(vector, "${}\r\n", word.len());
            vector.extend_from_slice(word);
            vector.extend_from_slice(b"\r\n");
        }
    }

    /// Sends the queued commands.
    ///
    /// # Errors
    /// If the connection is broken.
    pub fn send(&mut self) -> io::Result<()> {
        let stream = self.stream.get_mut();
        let sent = stream.write_all(&self.request).and_then(|()| stream.flush());
        self.request.clear();
        sent
    }

    /// Receives the next answer. Replaces the content of `value` by the value, if there is one.
    ///
    /// # Errors
    /// If the connection is broken, the server returns an error, or the answer is not valid.
    pub fn receive(&mut self, value: &mut Vec<u8>) -> io::Result<Answer> {
        self.line.clear();
        (&mut self.stream).take(LINE_BYTES_MAX).read_until(b'\n', &mut self.line)?;
        let Some(line) = self.line.strip_suffix(b"\r\n") else {
            return Err(Error::new(
                ErrorKind::UnexpectedEof,
                "the server closed the connection, or a line is too long",
            ));
        };
        let text = String::from_utf8_lossy(line.get(1..).unwrap_or_default());
        match line.first() {
            Some(b'+' | b':') => Ok(Answer::Done),
            Some(b'$') if text == "-1" => Ok(Answer::Nothing),
            Some(b'$') => match text.parse() {
                Ok(bytes) if bytes <= VALUE_BYTES_MAX => self.read_value(bytes, value),
                _ => Err(Error::new(ErrorKind::InvalidData, format!("a value of {text} bytes"))),
            },
            Some(b'-') => Err(Error::other(format!("the server refused: {text}"))),
            _ => Err(Error::new(
                ErrorKind::InvalidData,
                format!("an answer that is not of the protocol: {text:?}"),
            )),
        }
    }

    fn read_value(&mut self, bytes: usize, value: &mut Vec<u8>) -> io::Result<Answer> {
        value.resize(bytes, 0);
        self.stream.read_exact(value)?;
        let mut end = [0; 2];
        self.stream.read_exact(&mut end)?;
        if end != *b"\r\n" {
            return Err(Error::new(
                ErrorKind::InvalidData,
                "the value does not end after its announced length",
            ));
        }
        Ok(Answer::Value)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A stream with fixed input, which records its output.
    struct FakeStream {
        says: Cursor<Vec<u8>>,
        told: Vec<u8>,
    }

    impl Read for FakeStream {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.says.read(buffer)
        }
    }

    impl Write for FakeStream {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.told.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn client(says: &[u8]) -> Client<FakeStream> {
        Client::over(FakeStream { says: Cursor::new(says.to_vec()), told: Vec::new() })
    }

    #[test]
    fn commands_are_written_as_arrays_of_words() {
        let mut client = client(b"");
        client.add(&[b"SET", b"k", b"a\r\nb"]);
        client.add(&[b"GET", b"k"]);
        client.send().unwrap();
        let told = &client.stream.get_ref().told;
        assert_eq!(told, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\na\r\nb\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n");
    }

    #[test]
    fn each_kind_of_answer_is_recognized() {
        let mut client = client(b"+OK\r\n$4\r\na\r\nb\r\n$-1\r\n:7\r\n$0\r\n\r\n-ERR no\r\n");
        let mut value = b"before".to_vec();
        assert_eq!(client.receive(&mut value).unwrap(), Answer::Done);
        assert_eq!(client.receive(&mut value).unwrap(), Answer::Value);
        assert_eq!(value, b"a\r\nb");
        assert_eq!(client.receive(&mut value).unwrap(), Answer::Nothing);
        assert_eq!(client.receive(&mut value).unwrap(), Answer::Done);
        assert_eq!(client.receive(&mut value).unwrap(), Answer::Value);
        assert!(value.is_empty());
        assert!(client.receive(&mut value).unwrap_err().to_string().contains("ERR no"));
    }

    #[test]
    fn hostile_answers_are_errors() {
        let long = [b'+'; 4096];
        let cases: [&[u8]; 8] =
            [b"", b"\r\n", b"+OK", b"$9999999999\r\n", b"$-2\r\n", b"$5\r\nab\r\n", b"$1\r\nabc\r\n", &long];
        for says in cases {
            assert!(client(says).receive(&mut Vec::new()).is_err(), "{says:?}");
        }
    }
}
