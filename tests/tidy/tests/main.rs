//! The rules of the code base, and their readers.

mod helpers;
mod rules;
