//! The program as a user meets it: what it prints, what it leaves behind, and its exit codes.

mod bad_input;
mod checking;
mod claims;
mod devices;
mod diagnosing;
mod explaining;
mod files;
mod judging;
mod killing;
mod matrices;
mod native;
mod program;
mod running;
mod scripts;
mod supervising;
