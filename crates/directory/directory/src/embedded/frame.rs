//! Frames on a stream socket: a length of 4 bytes, little endian, and that many bytes.

use std::io::{self, Read, Write};

/// Most bytes of a frame, without its length.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Writes a frame, with one system call if the socket has room for it.
pub fn write(stream: &mut impl Write, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| too_long(body.len()))?;
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    stream.write_all(&frame)
}

/// Reads a frame; `None` if the stream ends before its first byte.
pub fn read(stream: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    let first = loop {
        match stream.read(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if first == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut length[first..])?;
    let mut body = vec![0; body_length(length)?];
    stream.read_exact(&mut body)?;
    Ok(Some(body))
}

/// Removes the first frame from the received bytes; `None` if it is not complete.
pub fn split_first(received: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
    let Some((length, rest)) = received.split_first_chunk::<4>() else { return Ok(None) };
    let length = body_length(*length)?;
    if rest.len() < length {
        return Ok(None);
    }
    let body = rest[..length].to_vec();
    received.drain(..4 + length);
    Ok(Some(body))
}

fn body_length(length: [u8; 4]) -> io::Result<usize> {
    let length = usize::try_from(u32::from_le_bytes(length)).map_err(|_| too_long(usize::MAX))?;
    if length > FRAME_BYTES_MAX {
        return Err(too_long(length));
    }
    Ok(length)
}

fn too_long(length: usize) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("a frame of {length} bytes is longer than {FRAME_BYTES_MAX} bytes"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_may_be_as_long_as_the_limit() {
        let mut wire = Vec::new();
        write(&mut wire, &vec![7; FRAME_BYTES_MAX]).unwrap();
        assert_eq!(read(&mut wire.as_slice()).unwrap().unwrap().len(), FRAME_BYTES_MAX);
        assert!(write(&mut wire, &vec![7; FRAME_BYTES_MAX + 1]).is_err());

        let over = u32::try_from(FRAME_BYTES_MAX + 1).unwrap().to_le_bytes();
        assert!(read(&mut over.as_slice()).is_err());
        assert!(split_first(&mut over.to_vec()).is_err());
    }

    #[test]
    fn frames_that_arrive_in_parts_are_joined() {
        let mut wire = Vec::new();
        write(&mut wire, b"first").unwrap();
        write(&mut wire, b"").unwrap();
        let (mut received, mut frames) = (Vec::new(), Vec::new());
        for byte in &wire {
            received.push(*byte);
            frames.extend(split_first(&mut received).unwrap());
        }
        assert_eq!(frames, [b"first".to_vec(), Vec::new()]);
        assert!(received.is_empty());
    }

    #[test]
    fn the_end_of_the_stream_differs_from_a_cut_frame() {
        assert_eq!(read(&mut [].as_slice()).unwrap(), None);
        assert!(read(&mut [1, 0].as_slice()).is_err());
        assert!(read(&mut [2, 0, 0, 0, 9].as_slice()).is_err());
    }
}
