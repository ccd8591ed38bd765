//! The older text format of Prometheus, for collectors and tools that do not ask for OpenMetrics:
//! `promtool check metrics` reads it.

/// Converts a text in OpenMetrics to the older format: families have the names of their samples,
/// and there are no units and no mark of the end.
pub(crate) fn from_openmetrics(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "EOF"] | ["#", "UNIT", ..] => continue,
            // The suffix is known with the type, which follows.
            ["#", "HELP", _, text] => help = Some(text),
            ["#", "TYPE", family, kind] => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    _ => ("", kind),
                };
                if let Some(help) = help.take() {
                    plain += &format!("# HELP {family}{suffix} {help}\n");
                }
                plain += &format!("# TYPE {family}{suffix} {kind}\n");
            }
            _ => {
                plain += line;
                plain.push('\n');
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_the_names_of_their_samples() {
        let text = "# HELP a_bytes Bytes of a.\n# TYPE a_bytes counter\n# UNIT a_bytes bytes\n\
                    a_bytes_total{x=\"1 2\"} 3\n\
                    # HELP b Build.\n# TYPE b info\nb_info{version=\"1\"} 1\n\
                    # HELP c Now.\n# TYPE c gauge\nc 4\n\
                    # HELP h Times.\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\nh_sum 2.0\nh_count 1\n\
                    # HELP u Other.\n# TYPE u unknown\nu 5\n# EOF\n";
        let expected = "# HELP a_bytes_total Bytes of a.\n# TYPE a_bytes_total counter\n\
                        a_bytes_total{x=\"1 2\"} 3\n\
                        # HELP b_info Build.\n# TYPE b_info gauge\nb_info{version=\"1\"} 1\n\
                        # HELP c Now.\n# TYPE c gauge\nc 4\n\
                        # HELP h Times.\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\nh_sum 2.0\nh_count 1\n\
                        # HELP u Other.\n# TYPE u untyped\nu 5\n";
        assert_eq!(from_openmetrics(text), expected);
        assert_eq!(from_openmetrics("# EOF\n"), "");
    }
}
