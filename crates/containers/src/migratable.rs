//! Types that may lie in a segment.

use std::fmt::Write as _;

use crate::allocator::SegmentAllocator;
use crate::map::Map;
use crate::ordered_map::OrderedMap;
use crate::text::Text;
use crate::vector::Vector;

/// A type that may lie in a segment.
///
/// # Safety
/// A value has no pointer to memory outside of its segment, directly or in what it owns: no `Box`,
/// `Rc`, `Vec` or `String` of the global allocator, no reference, no `dyn` and no function. It has
/// no meaning in one process only, such as a descriptor or a thread. What [`Self::describe`] writes
/// is the same in two programs only if values of one are values of the other.
///
/// [`migratable!`](crate::migratable!) defines a struct and does this for it.
pub unsafe trait Migratable {
    /// Writes down how values lie in memory.
    fn describe(description: &mut Description);
}

/// How the values of a type lie in memory, as a text: two programs that have the same text can hand
/// its values over to each other.
#[derive(Debug)]
pub struct Description {
    text: String,
}

impl Description {
    /// The description of a type, with the compiler and the versions of what lies in a segment.
    #[must_use]
    pub fn of<T: Migratable>() -> String {
        let mut description = Self { text: String::new() };
        T::describe(&mut description);
        Self::of_text(&description.text)
    }

    /// The description of what another language says about its type.
    #[must_use]
    pub fn of_text(text: &str) -> String {
        let arch = std::env::consts::ARCH;
        let (version, rustc) = (env!("CARGO_PKG_VERSION"), env!("AQUIFER_RUSTC"));
        format!("{text} (aquifer {version}, {rustc}, {arch})")
    }

    /// Writes a name with the size and alignment of the type.
    pub fn type_named<T>(&mut self, name: &str) {
        let _ = write!(self.text, "{name}:{}/{}", size_of::<T>(), align_of::<T>());
    }

    /// Writes the description of a type of which the described one consists.
    pub fn part<T: Migratable>(&mut self) {
        self.text.push('<');
        T::describe(self);
        self.text.push('>');
    }

    /// Writes a field of a struct.
    pub fn field<T: Migratable>(&mut self, name: &str, offset: usize) {
        let _ = write!(self.text, " {name}@{offset}=");
        T::describe(self);
    }
}

macro_rules! plain {
    ($($type:ty),*) => {
        $(
            // SAFETY: it is a number, and has no pointer.
            unsafe impl Migratable for $type {
                fn describe(description: &mut Description) {
                    description.type_named::<Self>(stringify!($type));
                }
            }
        )*
    };
}

plain!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64, bool, char, ());

macro_rules! composed {
    ($($type:ty = $name:literal where $($part:ident),*;)*) => {
        $(
            // SAFETY: it consists of values of these types, and of memory of its segment.
            unsafe impl<$($part: Migratable),*> Migratable for $type {
                fn describe(description: &mut Description) {
                    description.type_named::<Self>($name);
                    $(description.part::<$part>();)*
                }
            }
        )*
    };
}

composed! {
    Option<T> = "option" where T;
    (A, B) = "pair" where A, B;
    (A, B, C) = "triple" where A, B, C;
    Vector<T> = "vector" where T;
    Map<K, V> = "map" where K, V;
    OrderedMap<K, V> = "ordered-map" where K, V;
}

// SAFETY: it consists of values of this type.
unsafe impl<T: Migratable, const N: usize> Migratable for [T; N] {
    fn describe(description: &mut Description) {
        description.type_named::<Self>("array");
        description.part::<T>();
    }
}

// SAFETY: its bytes are in its segment.
unsafe impl Migratable for Text {
    fn describe(description: &mut Description) {
        description.type_named::<Self>("text");
    }
}

// SAFETY: it is the address of the header of its segment.
unsafe impl Migratable for SegmentAllocator {
    fn describe(description: &mut Description) {
        description.type_named::<Self>("allocator");
    }
}

/// Defines a struct that may lie in a segment, of fields that may. The number is its version: it
/// changes when the meaning of a field does.
///
/// ```
/// aquifer_containers::migratable! {
///     /// A counter.
///     #[derive(Debug)]
///     pub struct Counter: 1 {
///         /// How often it was counted.
///         pub hits: u64,
///         /// The clients that have counted.
///         pub by: aquifer_containers::Vector<u32>,
///     }
/// }
/// let text = aquifer_containers::Description::of::<Counter>();
/// assert!(text.starts_with("Counter.1:40/8 hits@0=u64:8/8 by@8=vector:"), "{text}");
/// ```
#[macro_export]
macro_rules! migratable {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident: $version:literal {
            $($(#[$field_attribute:meta])* $field_visibility:vis $field:ident: $type:ty),* $(,)?
        }
    ) => {
        $(#[$attribute])*
        #[repr(C)]
        $visibility struct $name {
            $($(#[$field_attribute])* $field_visibility $field: $type,)*
        }

        // SAFETY: all its fields are migratable, or it does not compile, and they lie as described.
        unsafe impl $crate::Migratable for $name {
            fn describe(description: &mut $crate::Description) {
                description.type_named::<Self>(concat!(stringify!($name), ".", stringify!($version)));
                $(description.field::<$type>(
                    stringify!($field),
                    $crate::private::offset_of!($name, $field),
                );)*
            }
        }
    };
}
