//! Frames on a stream socket: a length of 4 bytes (little endian), then that many bytes.

use std::io::{self, Read, Write};

/// Longest frame, its length not counted.
pub const FRAME_BYTES_MAX: usize = 1 << 20;

/// Write a frame, in one call so that small ones are one segment.
pub(super) fn write(stream: &mut impl Write, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len()).ok().filter(|_| body.len() <= FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| too_long(body.len()))?;
    let mut frame = Vec::with_capacity(4 + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(body);
    stream.write_all(&frame)
}

/// Read a frame; `None` if the peer closed the stream where a frame would begin.
pub(super) fn read(stream: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
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

/// Take the first whole frame out of what was received so far.
pub(super) fn take(received: &mut Vec<u8>) -> io::Result<Option<Vec<u8>>> {
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
    io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {length} bytes is over {FRAME_BYTES_MAX}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_at_the_limit_passes_and_one_over_does_not() {
        let mut wire = Vec::new();
        write(&mut wire, &vec![7; FRAME_BYTES_MAX]).unwrap();
        assert_eq!(read(&mut wire.as_slice()).unwrap().unwrap().len(), FRAME_BYTES_MAX);
        assert!(write(&mut wire, &vec![7; FRAME_BYTES_MAX + 1]).is_err());

        let over = u32::try_from(FRAME_BYTES_MAX + 1).unwrap().to_le_bytes();
        assert!(read(&mut over.as_slice()).is_err());
        assert!(take(&mut over.to_vec()).is_err());
    }

    #[test]
    fn frames_cut_anywhere_are_put_together() {
        let mut wire = Vec::new();
        write(&mut wire, b"first").unwrap();
        write(&mut wire, b"").unwrap();
        let (mut received, mut frames) = (Vec::new(), Vec::new());
        for byte in &wire {
            received.push(*byte);
            frames.extend(take(&mut received).unwrap());
        }
        assert_eq!(frames, [b"first".to_vec(), Vec::new()]);
        assert!(received.is_empty());
    }

    #[test]
    fn the_end_of_the_stream_is_told_from_a_cut_frame() {
        assert_eq!(read(&mut [].as_slice()).unwrap(), None);
        assert!(read(&mut [1, 0].as_slice()).is_err());
        assert!(read(&mut [2, 0, 0, 0, 9].as_slice()).is_err());
    }
}
