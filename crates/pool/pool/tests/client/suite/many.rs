//! Tests of several extents at once, and of stretches of sections.

use aquifer_fabric::Host;
use aquifer_pool::size::SECTION_BYTES;
use aquifer_pool::{Extent, PoolError, SizeClass};

use super::super::Bed;
use super::{NODE, Stamper, bed, class};

/// Clients that allocate stretches at once win races against each other, and roll back stretches
/// that they cannot complete.
#[test]
fn stretches_are_allocated_whole_or_not_at_all() {
    const SECTIONS: u64 = 7;
    let bed = bed(SECTIONS);
    std::thread::scope(|scope| {
        for host in 1..=3_u16 {
            let bed = &bed;
            scope.spawn(move || {
                let mut client = bed.client(host);
                let stamper = Stamper::new(&mut client);
                for turn in 0..Bed::TURNS / 16 {
                    let stretch = match client.allocate_stretch(NODE, 2 + (u32::from(host) % 2)) {
                        Ok(stretch) => stretch,
                        Err(PoolError::Full { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    let stamp = (u64::from(host) << 48) | (turn << 24);
                    let sections = || (stamp..).zip(stretch.extents());
                    sections().for_each(|(stamp, section)| stamper.write(&mut client, &section, stamp));
                    sections().for_each(|(stamp, section)| stamper.verify(&mut client, &section, stamp));
                    sections()
                        .for_each(|(_, section)| client.free(section).expect("the section is this host's"));
                }
            });
        }
    });
    let mut client = bed.client(9);
    assert_eq!(client.free_bytes(NODE), SECTIONS * SECTION_BYTES);
    let stretch = client.allocate_stretch(NODE, 7).expect("all is free");
    let places: Vec<u64> = stretch.extents().map(|section| section.addr).collect();
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] == SECTION_BYTES), "{places:x?}");
    assert_eq!(client.free_bytes(NODE), 0);
    let refused = client.allocate_stretch(NODE, 8);
    assert!(matches!(refused, Err(PoolError::Full { bytes, .. }) if bytes == 8 * SECTION_BYTES));
    stretch.extents().for_each(|section| client.free(section).expect("the section is this host's"));
    assert_eq!(client.free_bytes(NODE), SECTIONS * SECTION_BYTES);
}

/// The host's own extents are freed, and each other one has an error, whichever section it is in.
#[test]
fn many_extents_are_freed_at_once() {
    const SECTIONS: u64 = 40;
    let bed = bed(SECTIONS);
    let (mut client, mut other) = (bed.client(1), bed.client(2));
    let mut extents = Vec::new();
    for k in 0..SizeClass::COUNT {
        extents.extend(client.allocate_many(NODE, class(k), 12).expect("there is room"));
    }
    assert_eq!(extents.len(), 120);
    let theirs = other.allocate(NODE, SizeClass::CHUNK).expect("there is room");
    let twice = extents[5];
    let nowhere = Extent { addr: 0, ..twice };
    extents.extend([theirs, twice, nowhere]);
    let outcomes = client.free_many(NODE, &extents).expect("the node lives");
    assert!(outcomes[..120].iter().all(Result::is_ok), "{outcomes:?}");
    assert!(matches!(outcomes[120], Err(PoolError::NotOurs { owner: Host(2), .. })), "{:?}", outcomes[120]);
    assert!(matches!(outcomes[121], Err(PoolError::NotAllocated { .. })), "{:?}", outcomes[121]);
    assert!(matches!(outcomes[122], Err(PoolError::NotAllocated { .. })), "{:?}", outcomes[122]);
    client.refresh(NODE).expect("the node lives");
    assert_eq!(client.free_bytes(NODE), SECTIONS * SECTION_BYTES - 4096);
    other.free(theirs).expect("the extent is still the other host's");
    assert!(client.free_many(NODE, &[]).expect("the node lives").is_empty());
}
