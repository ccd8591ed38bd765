//! Tests of the command line.

use clap::CommandFactory;

use super::*;

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn the_help_names_every_command() {
    let mut command = Cli::command();
    let help = command.render_help().to_string();
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    for name in shown.map(clap::Command::get_name) {
        let is_listed = help.lines().any(|line| line.trim_start().split(' ').next() == Some(name));
        assert!(is_listed, "`{name}` is missing in the help:\n{help}");
    }
}

#[test]
fn times_are_parsed_and_bounded() {
    let valid =
        [("0", 0), ("1s", 1000), ("500ms", 500), ("2m", 120_000), ("30", 30_000), ("24h", TIME_MS_MAX)];
    for (text, time_ms) in valid {
        assert_eq!(parse_time_ms(text), Ok(time_ms), "{text}");
    }
    for text in ["", "s", "1d", "-1s", "1.5s", "1 s"] {
        assert!(parse_time_ms(text).unwrap_err().contains("is not a time"), "{text}");
    }
    for text in ["1441m", "86401", "99999999999999999999", "18446744073709551615h", "25h"] {
        assert!(parse_time_ms(text).unwrap_err().contains("longer than a day"), "{text}");
    }
}

#[test]
fn a_mistyped_option_is_no_program() {
    for (words, wrong) in [
        ("run --local 64M --strct -- true", "'--strct'"),
        ("run --local 64M -strict -- true", "'-s'"),
        ("run --lokal 64M -- true", "'--lokal'"),
        ("run --local 64M --strct true", "'--strct'"),
        ("check --agnet x -- true", "'--agnet'"),
        ("check -v", "'-v'"),
    ] {
        let words = std::iter::once("aquifer").chain(words.split(' '));
        let error = Cli::try_parse_from(words).unwrap_err().to_string();
        assert!(error.contains("unexpected argument") && error.contains(wrong), "{error}");
        assert!(!error.contains("--state"), "it is not required: {error}");
    }
}

#[test]
fn arguments_after_the_program_belong_to_the_program() {
    let words = "aquifer run --local 64M -- tar --state x -- y";
    let cli = Cli::try_parse_from(words.split(' ')).unwrap();
    assert_eq!(cli.state, None);
    let Command::Run(arguments) = cli.command else { panic!("expected a run") };
    assert_eq!(arguments.command, ["tar", "--state", "x", "--", "y"]);
    assert_eq!((arguments.local, arguments.replicas), (64 << 20, 1));
    for count in ["0", "4", "two", "-1"] {
        let words = ["aquifer", "run", "--local", "64M", "--replicas", count, "--", "true"];
        assert!(Cli::try_parse_from(words).is_err(), "{count} replicas must be refused");
    }
    for words in ["run --local 64M tar -x --local -- y", "run --local 64M -- tar -x --local -- y"] {
        let cli = Cli::try_parse_from(std::iter::once("aquifer").chain(words.split(' '))).unwrap();
        let Command::Run(arguments) = cli.command else { panic!("expected a run") };
        assert_eq!(arguments.command, ["tar", "-x", "--local", "--", "y"]);
    }
    let cli = Cli::try_parse_from(["aquifer", "run", "--local", "64M", "--", "-x", "-y"]).unwrap();
    let Command::Run(arguments) = cli.command else { panic!("expected a run") };
    assert_eq!(arguments.command, ["-x", "-y"], "after -- a program can have any name");
    assert!(Cli::try_parse_from(["aquifer", "run", "--local", "64M"]).is_err(), "a program is required");
    assert!(Cli::try_parse_from(["aquifer", "run", "--", "true"]).is_err(), "a limit is required");
}
