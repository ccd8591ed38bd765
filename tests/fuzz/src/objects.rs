//! Messages between clients of a heap and its service.

use aquifer_mutation::Mutations;
use aquifer_objects::Mutation;
use aquifer_objects::class::ClassId;
use aquifer_objects::header::ObjectNumber;
use aquifer_objects::pointer::Pointer;
use aquifer_objects::wire::{Answer, BlockRegion, Refused, Request};

use crate::Target;

pub(crate) const MESSAGES: Target = Target {
    name: "heap-messages",
    run: decode_message,
    seeds: messages,
    with_mutation: |work| Mutation::AcceptAnyLength.while_active(work),
};

/// Decodes a message as a request and as an answer.
fn decode_message(bytes: &[u8]) -> bool {
    let mut again = Vec::new();
    let request = Request::decode(bytes);
    if let Some(request) = request {
        request.encode(&mut again);
        assert_eq!(again, bytes, "{request:?}");
        again.clear();
    }
    let answer = Answer::decode(bytes);
    if let Some(answer) = &answer {
        answer.encode(&mut again);
        assert_eq!(again, bytes, "{answer:?}");
    }
    request.is_some() || answer.is_some()
}

fn messages() -> Vec<(&'static str, Vec<u8>)> {
    let number = ObjectNumber::new(77).expect("it is in range");
    let pointer = Pointer { node: 1, heap: 2, class: ClassId(3), address: 0x40, number };
    let encoded = |encode: &dyn Fn(&mut Vec<u8>)| {
        let mut message = Vec::new();
        encode(&mut message);
        message
    };
    let region = BlockRegion { base: 1 << 62, key: 7, heap: 2, node: 1 };
    vec![
        ("open", encoded(&|out| Request::Open.encode(out))),
        ("allocate", encoded(&|out| Request::Allocate { bytes: 100 }.encode(out))),
        ("write", encoded(&|out| Request::Write(pointer, b"bytes").encode(out))),
        ("create", encoded(&|out| Request::Create { bytes: 100, first: b"bytes" }.encode(out))),
        ("root", encoded(&|out| Request::Root { bytes: 100 }.encode(out))),
        ("write-at", encoded(&|out| Request::WriteAt { pointer, offset: 8, bytes: b"bytes" }.encode(out))),
        ("write-if", encoded(&|out| Request::WriteIf { pointer, expected: 7, bytes: b"bytes" }.encode(out))),
        ("replace", encoded(&|out| Request::Replace { pointer, staged: pointer, bytes: 5 }.encode(out))),
        ("release", encoded(&|out| Request::Release(pointer).encode(out))),
        ("opened", encoded(&|out| Answer::Opened(vec![region; 16]).encode(out))),
        ("pointer", encoded(&|out| Answer::Pointer(pointer, true).encode(out))),
        ("bytes", encoded(&|out| Answer::Bytes(pointer, false, b"bytes").encode(out))),
        ("refused", encoded(&|out| Answer::Refused(Refused::Full).encode(out))),
    ]
}
