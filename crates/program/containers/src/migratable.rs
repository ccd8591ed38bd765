//! The trait of types whose values may be in a segment, and descriptions of their layout.

use std::fmt::Write as _;

use crate::allocator::SegmentAllocator;
use crate::map::Map;
use crate::ordered_map::OrderedMap;
use crate::text::Text;
use crate::vector::Vector;

/// A type whose values may be in a segment.
///
/// # Safety
/// A value must have no pointer to memory outside of its segment, directly or in the values that it
/// owns: no `Box`, `Rc`, `Vec` or `String` of the global allocator, no reference, no `dyn` and no
/// function. It must not refer to something of one process, such as a descriptor or a thread. Two
/// programs in which [`Self::describe`] writes the same text must be able to use each other's
/// values.
///
/// [`migratable!`](crate::migratable!) defines a struct and implements this trait for it.
pub unsafe trait Migratable {
    /// Writes a description of the memory layout of values.
    fn describe(description: &mut Description);
}

/// A text that describes the memory layout of a type. Two programs with the same text can hand over
/// values of the type to each other.
#[derive(Debug)]
pub struct Description {
    text: String,
}

impl Description {
    /// Returns the description of a type, with the versions of this crate and of the compiler.
    #[must_use]
    pub fn of<T: Migratable>() -> String {
        let mut description = Self { text: String::new() };
        T::describe(&mut description);
        Self::of_text(&description.text)
    }

    /// Returns the description of a type of another language, which `text` describes.
    #[must_use]
    pub fn of_text(text: &str) -> String {
        let arch = std::env::consts::ARCH;
        let (version, rustc) = (env!("CARGO_PKG_VERSION"), env!("AQUIFER_RUSTC"));
        format!("{text} (aquifer {version}, {rustc}, {arch})")
    }

    /// Writes a name, with the size and alignment of the type.
    pub fn type_named<T>(&mut self, name: &str) {
        let _ = write!(self.text, "{name}:{}/{}", size_of::<T>(), align_of::<T>());
    }

    /// Writes the description of a component type.
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
            // SAFETY: a primitive type has no pointer.
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
            // SAFETY: a value consists of values of these types, and of memory of its segment.
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

// SAFETY: an array consists of values of this type.
unsafe impl<T: Migratable, const N: usize> Migratable for [T; N] {
    fn describe(description: &mut Description) {
        description.type_named::<Self>("array");
        description.part::<T>();
    }
}

// SAFETY: the bytes of a text are in its segment.
unsafe impl Migratable for Text {
    fn describe(description: &mut Description) {
        description.type_named::<Self>("text");
    }
}

// SAFETY: an allocator is the address of the header of its segment.
unsafe impl Migratable for SegmentAllocator {
    fn describe(description: &mut Description) {
        description.type_named::<Self>("allocator");
    }
}

/// Defines a [`Migratable`] struct; all fields must be [`Migratable`]. The number is the version of
/// the struct: change it when the meaning of a field changes.
///
/// ```
/// aquifer_containers::migratable! {
///     /// A counter.
///     #[derive(Debug)]
///     pub struct Counter: 1 {
///         /// The number of hits.
///         pub hits: u64,
///         /// The clients that have incremented it.
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

        // SAFETY: each field is migratable, which the compiler checks, and is described with its
        // offset.
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
